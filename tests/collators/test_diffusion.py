"""Collators of diffusion: what is noised, and packed rows against each document alone, as dllm trains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from tools.block_diffusion import reference_mask
from tools.model_pairs import MODELS, SIZES, WINDOW
from tools.tiny import assert_exact
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config

from flashmask_hf.collators import (
    DataCollatorForBlockDiffusion,
    DataCollatorForMaskedDiffusion,
    diffusion_loss,
    pack_dataset,
)
from flashmask_hf.long_rows.checkpointing import enable_checkpointing
from flashmask_hf.names import VECTORS

pytestmark = pytest.mark.usefixtures("float64")

MASK = 47
LENGTHS, PROMPTS = [14, 9, 21, 5], [3, 0, 6, 1]


def make_examples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, MASK, (n,), generator=generator).tolist() for n in LENGTHS]
    masks = [[0] * prompt + [1] * (n - prompt) for n, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    return [{"input_ids": x, "completion_mask": mask} for x, mask in zip(ids, masks, strict=True)]


CONFIGS = MODELS | {
    "qwen3": lambda: Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
}


def tiny_model(name: str = "llama") -> Any:
    torch.manual_seed(0)
    config: Any = CONFIGS[name]()
    config.initializer_range = 0.3
    options = {"experts_implementation": "eager"} if name == "gpt_oss" else {}  # others have no float64
    return AutoModelForCausalLM.from_config(config, **options).double()


def halves(batch: dict[str, Tensor], copies: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Read a packed batch by what its rows hold: (clean ids, noisy ids, weights) of each document, from the mask alone.

    A document's clean rows are where its labels or its prompt are; rows are sorted by position, copies kept in order.
    """
    found = []
    for row in range(len(batch["input_ids"])):
        starts = batch[VECTORS][row, 0, :, 0] > 0
        ids, positions, weights = (
            batch[name][row][starts] for name in ("input_ids", "position_ids", "diffusion_weights")
        )
        at = 0
        while at < len(ids):
            length = next(
                n
                for n in LENGTHS
                if sorted(positions[at : at + (copies + 1) * n].tolist()) == sorted([*range(n)] * (copies + 1))
            )
            span = slice(at, at + (copies + 1) * length)
            order = positions[span].argsort(stable=True).view(length, copies + 1).T  # copies, then clean
            noisy, clean = ids[span][order[:-1]], ids[span][order[-1]]
            found.append((clean, noisy, weights[span][order[:-1]]))
            at += (copies + 1) * length
    return found


def learned_packed(model: Any, batch: dict[str, Any]) -> tuple[Tensor, list[Any]]:
    """Return loss and gradients of packed rows, and leave the model with eager attention and no gradients."""
    model.set_attn_implementation("flashmask")
    model.loss_function = diffusion_loss
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = [x.grad for x in model.parameters()]
    model.zero_grad()
    model.set_attn_implementation("eager")
    return loss, gradients


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "llama"),
        ({"copies": 2, "complementary": True, "per": "block"}, "qwen3"),
        ({"weight": "uniform"}, "gpt_oss"),
        ({}, "mistral"),
        ({"copies": 2}, "gemma2"),
    ],
)
def test_block_diffusion_packed_is_as_each_document_alone(options: dict[str, Any], name: str) -> None:
    """Eager attention runs a document's noisy copies and then its clean tokens, under dllm's dense mask and loss."""
    size, copies = 4, options.get("copies", 1)
    collator = DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=size, max_length=24, seed=3, **options)
    batch = collator(make_examples())
    assert batch["input_ids"].shape[0] == 3
    model = tiny_model(name)
    kinds = getattr(model.config, "layer_types", None) or [f"{'sliding' if name == 'mistral' else 'full'}_attention"]
    loss, gradients = learned_packed(model, batch)
    documents, total = halves(batch, copies), sum(LENGTHS) - sum(PROMPTS)
    clean_ids = sorted(clean.tolist() for clean, _, _ in documents)
    assert clean_ids == sorted(example["input_ids"] for example in make_examples())
    losses = []
    for clean, noisy, weights in documents:
        n = len(clean)
        position = torch.arange(n).repeat(copies + 1)
        visible = reference_mask(n, size, copies)
        near = (position[:, None] - position).abs() < WINDOW
        hidden = {"full_attention": ~visible, "sliding_attention": ~(visible & near)}
        masks: Any = {kind: torch.where(x, -torch.inf, 0.0).double()[None, None] for kind, x in hidden.items()}
        ids = torch.cat([*noisy, clean])[None]
        given = masks if len(set(kinds)) > 1 else masks[kinds[0]]
        logits = model(ids, attention_mask=given, position_ids=position[None], use_cache=False).logits
        nll = cross_entropy(logits[0, : copies * n], clean.repeat(copies), reduction="none")
        losses.append((nll * weights.flatten()).sum() / total)
    torch.stack(losses).sum().backward()
    assert_exact([loss], [torch.stack(losses).sum()])
    assert_exact(gradients, [x.grad for x in model.parameters()])


@pytest.mark.parametrize("shift", [False, True])
def test_masked_diffusion_packed_is_as_each_document_alone(shift: bool) -> None:
    """The reference is LLaDA's loss; shifted, Dream's: the logits of a token are of the next one."""
    examples = make_examples()
    batch = DataCollatorForMaskedDiffusion(mask_token_id=MASK, seed=3, shift=shift)(examples)
    model = tiny_model()
    loss, gradients = learned_packed(model, batch)
    prompts = [max(prompt, int(shift)) for prompt in PROMPTS]
    reference: Any = 0
    pieces = zip(batch["input_ids"][0].split(LENGTHS), batch["diffusion_weights"][0].split(LENGTHS), strict=True)
    for example, prompt, (ids, weights) in zip(examples, prompts, pieces, strict=True):
        clean, n = torch.tensor(example["input_ids"]), len(ids)
        assert not (ids == MASK)[:prompt].any()
        logits = model(ids[None], attention_mask=torch.zeros(1, 1, n, n).double(), use_cache=False).logits[0]
        logits, weights = (logits[:-1], weights[:-1]) if shift else (logits, weights)
        assert ((weights > 0) == (ids == MASK)[int(shift) :]).all()
        reference = reference + (cross_entropy(logits, clean[int(shift) :], reduction="none") * weights).sum()
    reference = reference / (sum(LENGTHS) - sum(prompts))
    reference.backward()
    assert_exact([loss], [reference])
    assert_exact(gradients, [x.grad for x in model.parameters()])


def test_each_token_is_noised_in_one_of_two_complementary_copies() -> None:
    options: dict[str, Any] = dict(mask_token_id=MASK, block_size=4, copies=4, complementary=True, weight="uniform")
    collator = DataCollatorForBlockDiffusion(**options)
    assert collator.levels == (1e-3, 1 - 1e-3)  # of both copies
    for clean, noisy, weights in halves(collator(make_examples()), 4):
        prompt = PROMPTS[LENGTHS.index(len(clean))]
        noised = noisy == MASK
        assert (weights == noised / 4).all()
        for pair in noised.split(2):
            assert (pair[0] ^ pair[1])[prompt:].all()
            assert not pair[:, :prompt].any()
            assert torch.equal(noisy[~noised], clean.expand(4, -1)[~noised])


def test_noise_follows_levels_and_spans() -> None:
    example = {"input_ids": [5] * 40_000, "completion_mask": [1] * 40_000}
    options: dict[str, Any] = dict(mask_token_id=MASK, levels=(0.3, 0.8))
    (clean, noisy, weights), *_ = [_long(DataCollatorForBlockDiffusion(**options, block_size=4, per="block"), example)]
    levels = 1 / weights[weights > 0]
    assert 0.3 <= levels.min() < 0.301
    assert 0.799 < levels.max() <= 0.8
    assert abs((noisy == MASK).float().mean() - 0.55) < 0.01
    assert abs(weights.mean() - 1) < 0.02  # without bias
    one = DataCollatorForBlockDiffusion(**options, block_size=4)
    clean, noisy, weights = _long(one, example)
    assert len(weights[weights > 0].unique()) == 1
    assert abs((noisy == MASK).float().mean() * weights.max() - 1) < 0.02
    assert (clean == 5).all()


def _long(collator: Any, example: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    batch = collator([example])
    n = len(example["input_ids"])
    return batch["input_ids"][0, n:], batch["input_ids"][0, :n], batch["diffusion_weights"][0, :n]


def test_noise_is_new_in_each_epoch_and_worker_unless_a_seed_fixes_it() -> None:
    examples = make_examples()
    collator = DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=4)
    torch.manual_seed(0)
    first = collator(examples)["input_ids"]
    assert not torch.equal(collator(examples)["input_ids"], first)
    torch.manual_seed(0)
    assert torch.equal(collator(examples)["input_ids"], first)
    fixed = DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=4, seed=1)
    noisy = {len(clean): noisy.tolist() for clean, noisy, _ in halves(fixed(examples), 1)}
    same_length = fixed([{"input_ids": [*range(1, 31)]}, {"input_ids": [*range(2, 32)]}])["input_ids"][0].split(60)
    assert not torch.equal(same_length[0][:30] == MASK, same_length[1][:30] == MASK)
    torch.manual_seed(5)
    for clean, alone, _ in halves(fixed(examples[::-1]), 1):  # of another batch
        assert noisy[len(clean)] == alone.tolist()

    loader: Any = DataLoader([examples[2]] * 4, 1, collate_fn=collator, num_workers=2)
    epochs = [[tuple(batch["input_ids"][0].tolist()) for batch in loader] for _ in range(2)]
    assert len({ids for epoch in epochs for ids in epoch}) > 6  # of 8


def test_packed_rows_are_noised_document_by_document() -> None:

    rows = pack_dataset(Dataset.from_list(make_examples()), 24)
    batch = DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=4, max_length=24)(
        [rows[i] for i in range(len(rows))]
    )
    assert sorted(len(clean) for clean, _, _ in halves(batch, 1)) == sorted(LENGTHS)
    assert batch["labels"].ne(-100).sum() == sum(LENGTHS) - sum(PROMPTS)


def test_batches_do_not_depend_on_the_default_dtype() -> None:
    collator = DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=4, seed=3)
    want, before = collator(make_examples()), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = collator(make_examples())
    finally:
        torch.set_default_dtype(before)
    for name, x in want.items():
        assert (got[name].dtype, got[name].tolist()) == (x.dtype, x.tolist()), name


@pytest.mark.full
def test_a_compiled_and_checkpointed_model_has_the_same_loss() -> None:
    batch = DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=4, seed=3)(make_examples())
    model = tiny_model()
    model.set_attn_implementation("flashmask")
    model.loss_function = diffusion_loss
    want = model(**batch, use_cache=False).loss
    want.backward()
    gradients = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    given = {name: x for name, x in batch.items() if name in ("input_ids", "position_ids", VECTORS)}
    found: list[Any] = []
    for run in (torch.compile(model.model, backend="aot_eager"), model.model):
        hidden = run(**given, use_cache=False).last_hidden_state
        found.append([hidden, *torch.autograd.grad(hidden.sin().sum(), list(model.model.parameters()))])
    assert_exact(*found)
    enable_checkpointing(model.train(), {"use_reentrant": False})
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert_exact([loss], [want])
    assert_exact([x.grad for x in model.parameters()], gradients)


def test_a_causal_loss_on_a_diffusion_batch_is_refused() -> None:
    model = tiny_model()
    model.set_attn_implementation("flashmask")
    for options in ({"block_size": 1}, {"block_size": 4}, None):
        if options is None:
            collator: Any = DataCollatorForMaskedDiffusion(mask_token_id=MASK)
        else:
            collator = DataCollatorForBlockDiffusion(mask_token_id=MASK, **options)
        with pytest.raises(RuntimeError, match="labels name "):
            model(**collator(make_examples()), use_cache=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_size": 4.0}, TypeError, "block_size must be an int"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1"),
        ({"mask_token_id": None}, TypeError, "mask_token_id"),
        ({"copies": 3, "complementary": True}, ValueError, "even number of copies, got copies=3"),
        (
            {"levels": (0.8, 1.0), "copies": 2, "complementary": True},
            ValueError,
            r"needs levels\[0\] <= 0.5, .*, got 0.8",
        ),
        ({"per": "token"}, ValueError, "per must be 'document' or 'block'"),
        ({"weight": "t"}, ValueError, "weight must be '1/t' or 'uniform'"),
        ({"levels": (0.0, 1.0)}, ValueError, "levels must be 0 < low <= high <= 1"),
        ({"levels": 0.5}, ValueError, "levels must be one number for each of its 2 ends"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"shift": True}, ValueError, "shift is for whole documents"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        DataCollatorForBlockDiffusion(**{"mask_token_id": MASK, "block_size": 4} | options)


def test_shared_prefixes_are_refused() -> None:
    examples = [{"input_ids": [*range(1, 30), last]} for last in (31, 32)]
    rows = pack_dataset(Dataset.from_list(examples), 64, share_prefixes=True)
    with pytest.raises(ValueError, match="have weights, or share prefixes, which diffusion does not read"):
        DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=2)([rows[0]])


def test_a_block_of_padding_is_refused() -> None:
    collator = DataCollatorForBlockDiffusion(mask_token_id=MASK, block_size=2)
    with pytest.raises(ValueError, match="holds padding"):
        collator([{"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0]}])


def test_the_loss_of_a_step_without_labels_is_zero() -> None:
    labels, weights = torch.full((1, 2), -100), torch.zeros(1, 2)
    for count in (0, torch.tensor(0), None):
        logits = torch.zeros(1, 2, 3, requires_grad=True)
        given = dict(diffusion_labels=labels, diffusion_weights=weights, num_items_in_batch=count)
        loss = diffusion_loss(logits, labels, **given)
        assert (loss, torch.autograd.grad(loss, logits)[0].sum()) == (0, 0)


def test_the_loss_needs_its_labels_and_weights() -> None:
    with pytest.raises(ValueError, match="must be given; use a collator of diffusion"):
        diffusion_loss(torch.zeros(1, 2, 3), torch.zeros(1, 2).long())
    labels = torch.zeros(1, 3).long()
    with pytest.raises(ValueError, match=r"diffusion_labels must be \[R, S\] for logits \[1, 2, 3\], got \[1, 3\]"):
        diffusion_loss(torch.zeros(1, 2, 3), labels, diffusion_labels=labels, diffusion_weights=labels)
