"""Packing of examples with images: a packed row gives the logits, losses and gradients of its examples alone."""

import copy
import pickle
from functools import partial
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from tools.recurrent_kernels import hands_on_boundaries, with_stand_ins
from tools.support import requires
from tools.vision import END, IMAGE, KINDS, START, document, picture, placeholder, tiny_model, tiny_processor, words
from torch.utils.data import DataLoader
from transformers import Gemma4ForConditionalGeneration
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from flashmask_hf.collators import DataCollatorForPackedVisionLanguageModeling, RopeIndex
from flashmask_hf.collators.images import images_of

QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
QUICK = ("qwen2_5_vl", "gemma3", "smolvlm")
FILMS = (*QWEN, *["gemma4"] * ("num_frames_per_video" in signature(Gemma4ForConditionalGeneration.forward).parameters))
"""Kinds that take videos by their own keys. Gemma 4's have another form until transformers 5.17."""
LAYERS = {"qwen3_5": dict(layer_types=["full_attention"] * 2, num_hidden_layers=2)}
"""On a CPU the linear attention of Qwen3.5 has no kernels that read document boundaries."""


def example(kind, images, tail=4, first=2):
    """Return an example in TRL's standard format, with images of these sizes between words."""
    text = words(first) + words(1).join([placeholder(kind)] * len(images)) + words(tail)
    return {"text": text, "images": [picture(*size) for size in images]}


def conversation(*images, form="messages"):
    """Return an example in TRL's conversational format, with one image each of these sizes."""
    turns = [{"role": "user", "content": words(3)}, {"role": "assistant", "content": words(4)}]
    own = {"messages": turns} if form == "messages" else {"prompt": turns[:1], "completion": turns[1:]}
    return own | {"images": [picture(*size) for size in images]}


def made(processor, **options):
    """Return the packing collator, which takes an example {"document": ...} as its inputs."""
    trl = DataCollatorForVisionLanguageModeling(processor)

    def alone(examples):
        return examples[0].get("document") or trl(examples)

    return DataCollatorForPackedVisionLanguageModeling(processor, collator=alone, **options), alone


def examples_of(kind):
    """Return examples without, with one and with several images of several sizes, at the ends and inside."""
    if kind == "paligemma":  # TRL learns no suffixes; its processor takes no example without an image
        return [{"document": document(kind, images, 3, first)} for images, first in ((1, 2), (0, 2), (1, 0), (2, 2))
                for images in ([(1, 1)] * images,)]  # fmt: skip
    plain = [
        example(kind, [(1, 2)]),
        example(kind, []),
        example(kind, [(2, 4), (2, 1)], tail=0),  # ends with an image, and the next begins with one
        example(kind, [(2, 2)], first=0),
    ]
    if kind.startswith("gemma"):  # where marks keep images that see themselves apart
        seam = document(kind, [(2, 4), (2, 1)], 0), document(kind, [(2, 2)], 4, first=0)
        plain[2:] = [{"document": without_outer_marks(own)} for own in seam]
    if kind not in (*FILMS, "internvl", "smolvlm"):
        return plain
    film, other = (document(kind, [(2, 1, 2 if kind in QWEN else 1)], 3) for _ in range(2))
    if kind == "qwen2_5_vl":
        film["second_per_grid_ts"] = torch.tensor([1.5])
    image = document(kind, [(2, 3)], 3) if kind in FILMS else {}  # other kinds take frames as images
    both = image | other | {name: torch.cat([image[name], other[name]], 1) for name in image.keys() & other.keys()}
    return [*plain, {"document": film}, {"document": both}]


def without_outer_marks(inputs):
    """Return a document that begins and ends with an image token if it did with the mark of an image."""
    ids = inputs["input_ids"]
    inner = slice(int(ids[0, 0] == START), ids.shape[1] - int(ids[0, -1] == END))
    cut = {name: x[:, inner] if x.shape == ids.shape else x for name, x in inputs.items()}
    assert IMAGE in (cut["input_ids"][0, 0], cut["input_ids"][0, -1])
    return cut


def floats(batch, dtype):
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items() if name != "attention_mask"}


def train(model, batches, dtype=torch.float64):
    """Return the loss, the logits of all tokens and the gradients of a step on these batches."""
    labels = [batch["labels"][..., 1:] for batch in batches]
    items = sum(int((own != -100).sum()) for own in labels)
    outs = [model(**floats(batch, dtype), use_cache=False, num_items_in_batch=items) for batch in batches]
    loss = sum(out.loss for out in outs)
    loss.backward()
    logits = torch.cat([out.logits.flatten(0, 1) for out in outs]).detach()
    return loss.item(), logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def places_of(documents, batch):
    """Return where the tokens of documents, one after another, are in a batch."""
    ids, places = batch["input_ids"].flatten(), []
    for own in documents:
        n = own["input_ids"].shape[1]
        start = next(i for i in range(len(ids)) if torch.equal(ids[i : i + n], own["input_ids"][0]))
        places.append(torch.arange(start, start + n))
    return torch.cat(places)


def assert_packed_equals_alone(kind, stock, build, rows=1, *, rounds):
    """Compare packed rows in the model that `build` makes with their examples alone in `stock`.

    `rounds`: float32 rounds otherwise there, in rotary angles if PaliGemma counts positions from 1, and the delta rule.
    """
    examples = examples_of(kind)
    collator, alone = made(tiny_processor(kind), rope_index=RopeIndex.of(stock) if kind in QWEN else None)
    documents = [alone([copy.copy(own)]) for own in examples]
    lengths = [own["input_ids"].shape[1] for own in documents]
    if rows == 2:
        collator.max_length = max(max(lengths), sum(lengths) * 2 // 3)
    batch = collator(examples)
    assert len(batch["input_ids"]) == rows
    loss, logits, grads = train(stock, documents)
    packed_loss, packed_logits, packed_grads = train(build(), [batch])
    assert (packed_logits[places_of(documents, batch)] - logits).abs().max() < (1e-5 if rounds else 1e-13)
    assert abs(packed_loss - loss) < 5e-6  # of float32 logits: up to ten sums of at most 8
    assert packed_grads.keys() == grads.keys()
    assert any("vis" in name for name in grads)
    bound = 2e-6 if rounds or kind == "gemma4" else 2e-7  # Gemma 4 pools image features in float32
    assert max((packed_grads[name] - grads[name]).abs().max() for name in grads) < bound


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.full) for x in KINDS])
def test_packed_examples_equal_each_alone(kind, rows):
    stock = tiny_model(kind, "sdpa", **LAYERS.get(kind, {}))
    build = partial(tiny_model, kind, **LAYERS.get(kind, {}))
    assert_packed_equals_alone(kind, stock, build, rows, rounds=kind == "paligemma")


@pytest.mark.full
@hands_on_boundaries
def test_linear_attention_beside_images(monkeypatch):
    build = partial(with_stand_ins, partial(tiny_model, "qwen3_5"), monkeypatch)
    assert_packed_equals_alone("qwen3_5", tiny_model("qwen3_5", "sdpa"), build, rounds=True)


ROUNDED = [pytest.param(kind, "cpu", torch.float32, marks=pytest.mark.full, id=f"{kind}-cpu") for kind in KINDS]
ROUNDED += [
    pytest.param(kind, "cuda", dtype, marks=pytest.mark.gpu, id=f"{kind}-cuda-{dtype}")
    for kind in QUICK
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("kind", "device", "dtype"), ROUNDED)
def test_packed_examples_are_as_near_to_float64_as_stock(kind, device, dtype):
    """Logits, loss and gradients of a packed row, and stock's of the examples alone."""
    if device == "cuda":
        requires("gpu")
    layers = LAYERS.get(kind, {})
    rope_index = RopeIndex.of(tiny_model(kind, **layers)) if kind in QWEN else None
    collator, alone = made(tiny_processor(kind), rope_index=rope_index)
    examples = examples_of(kind)
    documents = [alone([copy.copy(own)]) for own in examples]
    packed = collator(examples)
    places = places_of(documents, packed)

    def step(attention, batches, device, dtype):
        model = tiny_model(kind, attention, **layers).to(device, dtype)
        moved = [{name: torch.as_tensor(x).to(device) for name, x in batch.items()} for batch in batches]
        loss, logits, grads = train(model, moved, dtype)
        logits = logits.cpu() if len(batches) > 1 else logits.cpu()[places]
        parts = [torch.tensor([loss]), logits, torch.cat([grads[name].flatten().cpu() for name in sorted(grads)])]
        return [part.double() for part in parts]

    exact = step("sdpa", documents, "cpu", torch.float64)
    ours = step("flashmask", [packed], device, dtype)
    stock = step("sdpa", documents, device, dtype)
    for want, found, other in zip(exact, ours, stock, strict=True):
        assert (other - want).norm() < 0.2 * want.norm()
        assert (found - want).norm() < 2 * (other - want).norm() + 1e-5 * want.norm()


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("gemma4", marks=pytest.mark.full)])
def test_an_image_longer_than_the_window_equals_alone(kind):
    stock, ours = (tiny_model(kind, attention, sliding_window=3) for attention in ("sdpa", "flashmask"))
    collator, alone = made(tiny_processor(kind))
    examples = examples_of(kind)
    _, logits, grads = train(stock, [alone([copy.copy(own)]) for own in examples])
    _, packed_logits, packed_grads = train(ours, [collator(examples)])
    assert (packed_logits - logits).abs().max() < 1e-13
    bound = 2e-7 if kind == "gemma3" else 2e-6  # Gemma 4 pools image features in float32
    assert max((packed_grads[name] - grads[name]).abs().max() for name in grads) < bound


@pytest.mark.parametrize("form", ["messages", "prompt"])
@pytest.mark.parametrize("only", [None, False])
def test_labels_are_trls(form, only):
    processor = tiny_processor("llava")
    examples = [conversation((1, 1), form=form), conversation(form=form), conversation((1, 2), (1, 1), form=form)]
    before = copy.deepcopy(examples)
    trl = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=form == "prompt" and only is None)
    want = [trl([copy.copy(own)])["labels"] for own in examples]
    batch = DataCollatorForPackedVisionLanguageModeling(processor, completion_only_loss=only)(examples)
    for own in want:
        own[0, 0] = -100
    assert torch.equal(batch["labels"], torch.cat(want, 1))
    assert examples == before
    if form == "messages":
        only_assistant = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True)
        batch = DataCollatorForPackedVisionLanguageModeling(processor, collator=only_assistant)(examples)
        want = torch.cat([only_assistant([copy.copy(own)])["labels"] for own in examples], 1)
        assert torch.equal(batch["labels"], want)
        assert (want != -100).sum() in (5, 3 * 5)  # transformers 5.17 finds no answer after an image


def test_copies_and_rows_packed_ahead_give_the_same_batch():
    processor, rope_index = tiny_processor("qwen2_5_vl"), RopeIndex.of(tiny_model("qwen2_5_vl"))
    collator = DataCollatorForPackedVisionLanguageModeling(processor, rope_index=rope_index, pad_to_multiple_of=16)
    examples = [conversation((1, 1)), conversation((2, 1), (1, 2)), {"messages": conversation()["messages"]}]
    examples[0]["image"] = examples[0].pop("images")[0]
    want = collator(examples)
    assert next(iter(want)) == "input_ids"
    assert want["input_ids"].shape[1] % 16 == 0
    assert "mm_token_type_ids" not in want
    copied = pickle.loads(pickle.dumps(collator))
    for got in (copied(examples), collator([{"examples": examples[:2]}, examples[2]])):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)
    rows = DataCollatorForPackedVisionLanguageModeling(processor, rope_index=rope_index, max_length=64)(
        [{"examples": examples[:2]}, {"examples": examples[2:]}]
    )
    assert rows["input_ids"].shape == (1, 64)


@pytest.mark.full
def test_a_worker_gives_the_same_batch():
    rope_index = RopeIndex.of(tiny_model("qwen3_vl"))
    collator = DataCollatorForPackedVisionLanguageModeling(tiny_processor("qwen3_vl"), rope_index=rope_index)
    examples = [conversation((1, 1)), conversation(), conversation((2, 1), (1, 2))]
    workers = dict(num_workers=1, multiprocessing_context="spawn")
    (got,), want = DataLoader(examples, batch_size=3, collate_fn=collator, **workers), collator(examples)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_the_first_of_four_axes_counts_tokens():
    count = torch.arange(6)[None, None]  # HunYuan-VL
    collator, _ = made(
        tiny_processor("llava"), rope_index=lambda document: torch.cat([count, count.expand(3, 1, 6) + 9])
    )
    batch = collator([example("llava", [])] * 2)
    assert batch["position_ids"].shape == (4, 1, 12)
    assert batch["position_ids"][:, 0, 6].tolist() == [0, 9, 9, 9]


def test_pixels_are_padded_to_the_largest_image():
    processor = copy.deepcopy(tiny_processor("smolvlm"))
    processor.image_processor.do_image_splitting = False
    stock, ours = tiny_model("smolvlm", "sdpa"), tiny_model("smolvlm")
    examples = [example("smolvlm", [(1, 2)]), example("smolvlm", [(2, 1), (2, 2)])]
    collator, alone = made(processor)
    want = train(stock, [alone([copy.copy(own)]) for own in examples])
    got = train(ours, [collator(examples)])
    assert (got[1] - want[1]).abs().max() < 1e-13


TILES = torch.arange(8.0).view(2, 4, 1, 1, 1)


@pytest.mark.parametrize(
    ("pixels", "joined"),
    {
        # PerceptionLM: [images, tiles, C, H, W]
        "tiles": ({"pixel_values": TILES}, torch.cat([TILES, TILES])),
        # Idefics: [1, images, C, H, W]
        "images of a batch": (
            {"pixel_values": TILES[:1], "pixel_attention_mask": torch.ones(1, 4, 1, 1)},
            torch.cat([TILES[:1], TILES[:1]], 1),
        ),
        # MiniCPM-V: [1, C, patch, patches]
        "patches": (
            {"pixel_values": TILES.view(1, 2, 1, 4), "target_sizes": torch.tensor([[2, 2]])},
            torch.cat([TILES.view(1, 2, 1, 4)] * 2, -1),
        ),
    }.values(),
    ids=["tiles", "images of a batch", "patches"],
)
def test_pixels_are_joined_along_images(pixels, joined):
    processor = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
    collator = DataCollatorForPackedVisionLanguageModeling(processor, collator=lambda given: given[0]["document"])
    ids = torch.arange(6, 10)[None]
    example = {"document": {"input_ids": ids, "labels": ids} | pixels}
    assert torch.equal(collator([example, example])["pixel_values"], joined)


def _with(key, value):
    return {"document": document("llava", [(1, 1)], 3) | {key: value}}


ERRORS = {
    "an unknown key": (_with("cross_attention_mask", torch.ones(1)), "gives the model cross_attention_mask, which has"),
    "labels of another length": (_with("labels", torch.ones(1, 3)), r"labels of example 0 must have .*, got \[1, 3\]"),
    "padding": (_with("attention_mask", torch.zeros(1, 9)), "example 0 holds padding"),
    "an image too many": (_with("pixel_values", torch.ones(2, 3, 8, 8)), "has 4 image tokens, but its images have 8"),
    "no pixels": (_with("input_ids", torch.full((1, 9), 90)), "has 9 image tokens, but its images have 4 features"),
}


@pytest.mark.parametrize("wrong", ERRORS)
def test_wrong_examples_raise(wrong):
    collator, _ = made(tiny_processor("llava"))
    given, message = ERRORS[wrong]
    with pytest.raises(ValueError, match=message):
        collator([given])


def test_an_image_comes_before_images_as_in_trl():
    one, two = picture(1, 1), picture(1, 2)
    assert images_of({"image": one, "images": [two]}) == [one]
    assert images_of({"image": None, "images": [two]}) == [two]
    assert images_of({"images": None}) == images_of({}) == []


def test_wrong_rows_raise():
    processor = tiny_processor("llava")
    with pytest.raises(TypeError, match=r"processor must be of text and images, got \w+; load it by Auto"):
        DataCollatorForPackedVisionLanguageModeling(processor.tokenizer)
    with pytest.raises(ValueError, match="example 0 is tokenized, but TRL's collator takes raw examples; keep the col"):
        DataCollatorForPackedVisionLanguageModeling(processor)([{"input_ids": [1, 2], "labels": [1, 2]}])
    film = {"input_ids": torch.tensor([[5, 92, 92]]), "labels": torch.tensor([[5, 92, 92]])}
    with pytest.raises(ValueError, match="example 0 has <video>, but its inputs have no video, which TRL's collator"):
        made(tiny_processor("qwen3_vl"))[0]([{"document": film}])
    collator, _ = made(processor, max_length=16)
    without = document("llava", [(1, 1)], 2)
    del without["pixel_values"]
    with pytest.raises(ValueError, match="example 1 has 22 tokens, more than the 16 of a row; make rows longer"):
        collator([example("llava", [(1, 1)]), example("llava", [(1, 1)], tail=16)])
    with pytest.raises(ValueError, match=r"examples\[1\] of example 0 has 4 image tokens, but its images have 0"):
        collator([{"examples": [example("llava", []), {"document": without}]}])
    pixels = {
        "pixel_values": torch.ones(1, 3, 8, 16),
        "input_ids": torch.tensor([[90] * 8]),
        "labels": torch.ones(1, 8),
    }
    with pytest.raises(
        ValueError, match=r"pixel_values must have one shape per image, got \[\(3, 8, 8\), \(3, 8, 16\)\]"
    ):
        made(processor)[0]([example("llava", [(1, 1)]), {"document": pixels}])
    with pytest.raises(ValueError, match="completion_only_loss is for TRL's collator"):
        made(processor, completion_only_loss=True)
    with pytest.raises(ValueError, match="has no token_type_ids, but example 0"):
        made(processor)[0]([{"document": document("gemma3", [], 3)}, {"document": document("llava", [], 3)}])
