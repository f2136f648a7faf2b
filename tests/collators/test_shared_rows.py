"""Log-probabilities of shared rows equal the padded model's, in the layouts of other trainers' actors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tools.model_pairs import model_pair
from tools.tiny import assert_exact
from torch import Tensor

from flashmask_hf.collators import gather_logps, pack_shared
from flashmask_hf.collators.shared_rows import pack_sequences

TEMPERATURE, PROMPT, RESPONSE = 0.75, 9, 6


def rollouts() -> dict[str, Tensor]:
    """Draw 3 prompts, padded on the left, with 4 responses each, padded on the right; one starts as another."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 48, (12, PROMPT + RESPONSE), generator=draw)
    ids[:, :PROMPT] = ids[::4, :PROMPT].repeat_interleave(4, 0)
    ids[1, PROMPT : PROMPT + 3] = ids[0, PROMPT : PROMPT + 3]
    starts = torch.randint(0, PROMPT - 1, (3, 1), generator=draw).repeat_interleave(4, 0)
    ends = PROMPT + torch.randint(1, RESPONSE + 1, (12, 1), generator=draw)
    columns = torch.arange(PROMPT + RESPONSE)
    mask = ((columns >= starts) & (columns < ends)).long()
    order = torch.randperm(12, generator=draw)
    return {"input_ids": (ids * mask)[order], "attention_mask": mask[order]}


def stock(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return log-probabilities and entropies [2, N, L] of each token's prediction, from full logits of padded rows."""
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = model(**batch, position_ids=positions).logits[:, :-1] / TEMPERATURE
    logps = logits.log_softmax(-1)
    found = logps.gather(-1, batch["input_ids"][:, 1:, None])[..., 0], -(logps.exp() * logps).sum(-1)
    values = torch.nn.functional.pad(torch.stack(found), (1, 0))
    mask = batch["attention_mask"]
    return values * mask * (mask.cumsum(1) > 1)


def shared(model: Any, rows: Any, **options: Any) -> Tensor:
    hidden = model.model(**rows.batch, use_cache=False).last_hidden_state
    return gather_logps(hidden, model.lm_head, rows, temperature=TEMPERATURE, entropy=True, **options)


def flat(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the real tokens in one row, and their positions."""
    real = batch["attention_mask"] == 1
    return batch["input_ids"][real][None], (batch["attention_mask"].cumsum(1) - 1)[real][None]


def padded(batch: dict[str, Tensor], values: Tensor) -> Tensor:
    """Lay out values [2, 1, n] of a flat row as the batch."""
    found = values.new_zeros(2, *batch["input_ids"].shape)
    found[:, batch["attention_mask"] == 1] = values[:, 0]
    return found


def verl_padded(model: Any, batch: dict[str, Tensor]) -> Tensor:
    responses = batch["attention_mask"][:, PROMPT:]
    values = shared(model, pack_shared(**batch, scored=responses), chunk=7)
    assert values.shape == (2, 12, RESPONSE)
    return torch.nn.functional.pad(values, (PROMPT, 0))


def verl_without_padding(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """As verl's engine, the log-probability of a token is at the token before."""
    ids, positions = flat(batch)
    rolled = shared(model, pack_shared(ids, position_ids=positions), chunk=1000).roll(-1, -1)
    return padded(batch, rolled.roll(1, -1))


def numbered(model: Any, batch: dict[str, Tensor]) -> Tensor:
    ids, positions = flat(batch)
    return padded(batch, shared(model, pack_shared(ids, (positions == 0).cumsum(1))))


def open_rlhf(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Padding has position 1, and actions are the last columns."""
    positions = (batch["attention_mask"].cumsum(1) - 1).masked_fill(batch["attention_mask"] == 0, 1)
    rows = pack_shared(**batch, position_ids=positions, scored=batch["attention_mask"][:, PROMPT:].bool())
    return torch.nn.functional.pad(shared(model, rows), (PROMPT, 0))


def nemo_rl(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sequences are padded on the right, and every token is scored."""
    lengths = batch["attention_mask"].sum(1, keepdim=True)
    place = (torch.arange(PROMPT + RESPONSE) + (batch["attention_mask"].argmax(1))[:, None]) % (PROMPT + RESPONSE)
    mask = torch.arange(PROMPT + RESPONSE) < lengths
    values = shared(model, pack_shared(batch["input_ids"].gather(1, place), mask))
    return torch.zeros_like(values).scatter(2, place.expand_as(values), values)


def column_positions(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Positions count padding on the left, to which RoPE is blind."""
    return shared(model, pack_shared(**batch, position_ids=torch.arange(PROMPT + RESPONSE).expand(12, -1)))


def rows_of_48(model: Any, batch: dict[str, Tensor]) -> Tensor:
    rows = pack_shared(**batch, max_length=48)
    assert rows.batch["input_ids"].shape == (2, 48)
    computed = pack_shared(**batch).batch["input_ids"].numel()
    assert rows.saved == pytest.approx(1 - computed / int(batch["attention_mask"].sum()))
    return shared(model, rows)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "actor", [verl_padded, verl_without_padding, numbered, open_rlhf, nemo_rl, column_positions, rows_of_48]
)
def test_log_probabilities_entropies_and_gradients(actor):
    ours, eager = (model.double() for model in model_pair("llama"))
    batch = rollouts()
    found, expected = actor(ours, batch), stock(eager, batch)
    if actor in (verl_padded, open_rlhf):
        expected = expected * (torch.arange(PROMPT + RESPONSE) >= PROMPT)
    assert_exact([found], [expected])
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_exact(*([p.grad for p in model.parameters()] for model in (ours, eager)))


def test_the_head_sees_the_predictors_of_scored_tokens_in_chunks():
    batch = rollouts()
    rows = pack_shared(**batch, scored=batch["attention_mask"][:, PROMPT:])
    count, seen = int(batch["attention_mask"][:, PROMPT:].sum()), []

    def head(states: Tensor) -> Tensor:
        seen.append(len(states))
        return states

    hidden = torch.randn(*rows.batch["input_ids"].shape, 48, requires_grad=True)
    values = gather_logps(hidden, head, rows, chunk=10)
    assert seen == [10] * (count // 10) + [count % 10]
    assert values.shape == (12, RESPONSE)
    values.sum().backward()
    assert len(seen) == 2 * (count // 10 + 1)  # computed again in the backward
    nothing = pack_shared(**batch, scored=torch.zeros(12, RESPONSE))
    assert not gather_logps(hidden, head, nothing).any()


def test_scores_of_a_sixteen_bit_head_are_computed_in_float32():
    rows = pack_shared(**rollouts())
    logits = torch.randn(*rows.batch["input_ids"].shape, 48).bfloat16()
    found, want = (gather_logps(x, torch.nn.Identity(), rows, temperature=0.75) for x in (logits, logits.float()))
    assert torch.equal(found, want)


@pytest.mark.parametrize("columns", [1, RESPONSE])
def test_rows_or_tokens_have_temperatures_of_their_own(columns):
    batch = rollouts()
    rows = pack_shared(**batch, scored=batch["attention_mask"][:, PROMPT:])
    hidden, head = torch.randn(*rows.batch["input_ids"].shape, 4), torch.nn.Linear(4, 48)
    low, high = (gather_logps(hidden, head, rows, temperature=x, entropy=True, chunk=7) for x in (0.5, 3))
    is_low = (torch.arange(12)[:, None] + torch.arange(columns)) % 3 == 0
    given = torch.where(is_low, 0.5, 3.0)
    found = gather_logps(hidden, head, rows, temperature=given, entropy=True, chunk=7)
    assert torch.equal(found, torch.where(is_low, low, high))
    for wrong in (given[:, 0], given[:1], given[None]):
        with pytest.raises(ValueError, match=r"temperature must be a number, \[N, 1\] or .* for scored \[12, 6\]"):
            gather_logps(hidden, head, rows, temperature=wrong)
    for number in (0.0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"temperature must be positive, got {number}"):
            gather_logps(hidden, head, rows, temperature=number)


def test_scores_need_no_value_of_the_device():
    """Tensors without data stand for a device, for which the host would wait."""
    rows = pack_shared(**rollouts())
    names = ("scored", "places", "predictors", "labels")
    tensors = {name: getattr(rows, name).to("meta") for name in names}
    hidden = torch.empty(*rows.batch["input_ids"].shape, 48, device="meta", requires_grad=True)
    values = gather_logps(hidden, lambda states: states, replace(rows, **tensors), entropy=True)
    assert values.shape == (2, 12, PROMPT + RESPONSE)
    values.sum().backward()


def test_entries_of_padding_repeat_as_little_as_the_batch_is_larger():
    """The backward adds gradients of equal entries one by one."""
    batch = rollouts()
    real = batch["attention_mask"].numpy() == 1
    rows, index, _ = pack_sequences(batch["input_ids"].numpy(), real)
    assert np.bincount(index[~real]).max() <= -(-real.size // rows.input_ids.size)


def test_wrong_batches():
    ids, mask = torch.arange(6).view(2, 3), torch.ones(2, 3)
    for arguments in (
        dict(attention_mask=mask[:1]),
        dict(position_ids=mask[0]),
        dict(scored=mask[:1]),
        dict(scored=torch.ones(2, 4)),
        dict(position_ids=mask[:, :2]),
    ):
        with pytest.raises(ValueError, match=r"must be \[N, L\], scored \[N, K <= L\], got \[\[2, 3\]"):
            pack_shared(ids, **arguments)
    with pytest.raises(ValueError, match="padding inside"):
        pack_shared(ids, torch.tensor([[1, 0, 1], [1, 1, 1]]))
    with pytest.raises(ValueError, match="padding inside"):
        pack_shared(ids, torch.tensor([[2, 2, 1], [1, 1, 1]]))
    with pytest.raises(ValueError, match="position_ids that jump"):
        pack_shared(ids, position_ids=torch.tensor([[0, 1, 3], [0, 1, 2]]))
    for given in (None, mask, torch.tensor([[1, 1, 1], [0, 1, 1]]), torch.tensor([[1, 1, 1], [1, 2, 2]])):
        with pytest.raises(ValueError, match="do not start at 0"):
            pack_shared(ids, given, torch.tensor([[0, 1, 2], [4, 5, 6]]))
    for empty in (0 * mask, mask[:, :0], mask[:0]):
        with pytest.raises(ValueError, match="0 everywhere"):
            pack_shared(ids[: len(empty), : empty.shape[1]], empty)
        with pytest.raises(ValueError, match="nothing to pack"):
            pack_shared(ids[:, :0])
    with pytest.raises(ValueError, match="more than the 2 of a row"):
        pack_shared(ids, max_length=2)
    with pytest.raises(ValueError, match="chunk must be"):
        gather_logps(torch.zeros(1, 6, 4), torch.nn.Linear(4, 8), pack_shared(ids), chunk=0)
