"""Packed rows with images whose tokens see each other: every document is as alone, by positions and by mask indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tools.tiny import assert_exact, assert_same_gradients, gradients_of
from tools.vision import IMAGE, SPECIAL, document, tiny_model
from torch import Tensor

from flashmask_hf import FlashMask, masks
from flashmask_hf.hf.merge import supplied_mask

GEMMA2 = dict(model_type="gemma2", sliding_window=3, layer_types=["sliding_attention", "full_attention"])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", dict(sliding_window=3)),
    "gemma4": ("gemma4", dict(sliding_window=3)),
    "paligemma": ("paligemma", {}),
    "paligemma2": ("paligemma", GEMMA2),
}
"""Kinds of models, with windows shorter than an image of 4 tokens."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("float64"),
]


def documents_of(kind: str) -> list[dict[str, Tensor]]:
    """Return documents with images, with none, that end with an image, and that begin with one."""
    if kind == "paligemma":  # images come first; without words after it all of a document is its prefix
        sizes = [([(1, 1)], 4, 2), ([(1, 1)], 0, 3), ([(1, 1)], 3, 0), ([(1, 1)], 0, 5)]
    else:
        one = [(1, 1)]
        sizes = [(one, 5, 2), ([], 6, 2), (one * 2, 0, 1), (one, 3, 0), (one * 2, 9, 0)]
    documents = [document(kind, images, tail, first=first) for images, tail, first in sizes]
    for index, own in enumerate(documents):
        own.pop("labels")
        own["position_ids"] = torch.arange(own["input_ids"].shape[1])[None]  # PaliGemma would count from 1
        if kind == "paligemma" and index % 2:
            own["token_type_ids"] = torch.zeros_like(own["token_type_ids"])
    return documents


def row_of(documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the documents in one row, whose positions start again."""
    names = dict.fromkeys(name for own in documents for name in own)
    tokens = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids")
    return {name: torch.cat([own[name] for own in documents if name in own], int(name in tokens)) for name in names}


def spans_of(kind: str, documents: list[dict[str, Tensor]]) -> list[tuple[int, int]]:
    """Return the images of a row of documents, or with PaliGemma their prefixes, as `masks.blocks` takes them."""
    spans, start = [], 0
    for own in documents:
        inside = own["token_type_ids"] == 0 if kind == "paligemma" else own["input_ids"] == IMAGE
        edges = torch.nn.functional.pad(inside[0].int(), (1, 1)).diff().nonzero()[:, 0].view(-1, 2) + start
        spans += [tuple(edge) for edge in edges.tolist()]
        start += inside.shape[1]
    return spans


def indices_of(form: str, kind: str, documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mask indices of a row in one of three forms: none, of documents, or of documents and blocks."""
    lengths = [own["input_ids"].shape[1] for own in documents]
    if form == "positions":
        return {}
    mask = masks.causal_document(lengths)
    if form == "blocks":
        mask = masks.blocks(lengths, spans_of(kind, documents)).bidirectional()
    return {"startend_row_indices": mask.indices}


def logits_and_gradients(model: Any, batches: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the joined logits and the gradient of every parameter."""
    model.zero_grad()
    logits = torch.cat([model(**batch, use_cache=False).logits for batch in batches], 1)
    (
        logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    ).sum().backward()
    return logits.detach(), gradients_of(model)


def assert_equal(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert_exact([got[0]], [want[0]])
    assert_same_gradients(got[1], want[1])


FORMS = [(name, form) for name in MODELS for form in ("positions", "documents", "blocks")]
FORMS.remove(("gemma4", "blocks"))  # such indices are for every layer, but images are whole in its sliding layers alone


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_documents_of_a_row_are_as_alone(name, form):
    """transformers itself says which images cross a window, in the installed version: "eager" runs each document."""
    kind, text = MODELS[name]
    documents = documents_of(kind)
    model = tiny_model(kind, "eager", **text)
    alone = logits_and_gradients(model, documents)
    model.set_attn_implementation({"text_config": "flashmask", "vision_config": "sdpa"})
    row = row_of(documents) | indices_of(form, kind, documents)
    assert_equal(logits_and_gradients(model, [row]), alone)


def test_blocks_in_every_layer_of_gemma4_are_refused():
    """Its full layers are causal. Causal indices with n = 4 are right, and rows of text may have any."""
    documents = documents_of("gemma4")
    model = tiny_model("gemma4", {"text_config": "flashmask", "vision_config": "sdpa"}, sliding_window=3)
    row = row_of(documents)
    with pytest.raises(RuntimeError, match=r"images are whole in the windows of this model alone; pass masks.causal"):
        model(**row, **indices_of("blocks", "gemma4", documents), use_cache=False)
    text = {name: x for name, x in row.items() if name in ("input_ids", "position_ids")}
    text["mm_token_type_ids"] = torch.zeros_like(text["input_ids"])
    text["input_ids"] = text["input_ids"].clamp(max=80)
    assert model(**text, **indices_of("blocks", "gemma4", documents), use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("name", [*MODELS])
def test_answers_of_a_shared_prompt_with_an_image_are_as_alone(name):
    """Mask indices of shared questions are causal, and images stay whole."""
    kind, text = MODELS[name]
    prompt = documents_of(kind)[0]
    length, answers = prompt["input_ids"].shape[1], [[7, 8, 9, 10, 11], [12, 13, 14]]
    types = "mm_token_type_ids" if kind == "gemma4" else "token_type_ids"

    def continued(answer: list[int], positions: list[int]) -> dict[str, Tensor]:
        end = {"input_ids": answer, "position_ids": positions, types: [int(kind == "paligemma")] * len(answer)}
        return prompt | {key: torch.cat([prompt[key], torch.tensor([x])], 1) for key, x in end.items()}

    depths = [[*range(length, length + len(answer))] for answer in answers]
    model = tiny_model(kind, "eager", **text)
    alone = [model(**continued(*pair), use_cache=False).logits for pair in zip(answers, depths, strict=True)]
    model.set_attn_implementation({"text_config": "flashmask", "vision_config": "sdpa"})
    indices = masks.share_question([(length, [len(answer) for answer in answers])]).indices
    row = continued([*answers[0], *answers[1]], [*depths[0], *depths[1]])
    if name == "paligemma2":
        with pytest.raises(NotImplementedError, match=r"trees are not implemented where tokens of an image see each"):
            model(**row, startend_row_indices=indices, use_cache=False)
        return
    logits = model(**row, startend_row_indices=indices, use_cache=False).logits
    want = torch.cat([alone[0], alone[1][:, length:]], 1)
    assert_exact([logits], [want])


def test_padding_on_the_right_is_no_prefix_of_paligemma():
    """Padding has token type 0, too."""
    own = documents_of("paligemma")[0]
    model, padded = tiny_model("paligemma", "eager"), dict(own)
    want = model(**own).logits
    for key, filler in (("input_ids", 0), ("token_type_ids", 0), ("position_ids", 0)):
        padded[key] = torch.nn.functional.pad(own[key], (0, 3), value=filler)
    padded["attention_mask"] = torch.nn.functional.pad(torch.ones_like(own["input_ids"]), (0, 3))
    model.set_attn_implementation({"text_config": "flashmask", "vision_config": "sdpa"})
    assert_exact([model(**padded).logits[:, :-3]], [want])


def test_documents_of_paligemma_that_start_at_1_are_refused():
    documents = documents_of("paligemma")
    model, row = tiny_model("paligemma"), row_of(documents)
    row["position_ids"] += 1
    with pytest.raises(RuntimeError, match="position_ids start again at 1 in one row"):
        model(**row, use_cache=False)
    want = model(**row_of(documents), use_cache=False).logits
    numbered = model(**row, **indices_of("documents", "paligemma", documents), use_cache=False).logits
    assert (numbered - want).abs().max() <= 1e-5 * want.abs().max()  # sines and cosines are float32
    own = documents[0] | {"attention_mask": torch.ones_like(documents[0]["input_ids"])}
    own.pop("position_ids")
    assert model.eval().generate(**own, max_new_tokens=2, do_sample=False).shape[1] > own["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        (masks.sliding_window(13, 2), [*range(13)]),
        (masks.share_question([(5, [3, 5])]), [*range(8), *range(5, 10)]),
    ],
    ids=["window", "answer"],
)
def test_mask_indices_that_part_an_image_are_refused(mask, positions):
    own = documents_of("gemma3")[0] | {"position_ids": torch.tensor([positions])}
    model = tiny_model("gemma3", {"text_config": "flashmask", "vision_config": "sdpa"})
    with pytest.raises(RuntimeError, match="hide tokens of a block"):
        model(**own, startend_row_indices=mask.indices, use_cache=False)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "paligemma"])
@pytest.mark.parametrize("form", ["documents", "blocks"])
def test_rows_whose_images_another_attention_would_look_up_at_positions_are_refused(name, form):
    kind, text = MODELS[name]
    documents = documents_of(kind)
    model = tiny_model(kind, "eager", **text)
    row = row_of(documents) | indices_of(form, kind, documents)
    with pytest.raises((ValueError, RuntimeError), match=r"'eager' ignores them; load with 'flashmask'"):
        model(**row, use_cache=False)


def test_compiled_rows_of_text_keep_their_window_in_a_model_of_images():
    """Images in a window would need more columns, so these raise."""
    row = torch.arange(8, dtype=torch.int32)
    vectors = masks.causal_document([5, 3]).indices

    def windowed(vectors: Tensor, first: Tensor) -> Tensor:
        columns = [torch.full_like(row, 8), torch.full_like(row, 8), torch.zeros_like(row), first]
        return supplied_mask(vectors, torch.stack(columns)[None, None], True, 2, None).mask.indices

    compiled = torch.compile(windowed, backend="eager", fullgraph=True)
    want = masks.causal_document([5, 3]) & masks.sliding_window(8, 2)
    assert torch.equal(compiled(vectors, row), want.indices)
    with pytest.raises(RuntimeError, match="hide tokens of a block"):
        compiled(vectors, (row - 1).clamp(min=0))


def test_a_mask_that_is_not_of_blocks_counts_as_padding_alone():
    """It hides rows in the middle of a key."""
    visible = masks.causal(8).to_dense()
    visible[..., 3:5, 1] = False
    documents = masks.causal_document([5, 3])

    def joined() -> FlashMask:
        hooked = FlashMask.from_dense(visible).bidirectional().indices.transpose(2, 3)
        return supplied_mask(documents.indices, hooked, True, None, None).mask

    assert torch.equal(joined().to_dense(8), documents.to_dense(8))
    visible[..., 3, 4], visible[..., 6, 4] = True, False
    with pytest.raises(RuntimeError, match="hide tokens of a block"):
        joined()


def qwen_row() -> tuple[Any, list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a Qwen2.5-VL, two documents with images, and the row of both without positions."""
    documents = [document("qwen2_5_vl", images, 4) for images in ([(1, 2)], [(1, 1), (2, 1)])]
    for own in documents:
        own.pop("labels")
    return tiny_model("qwen2_5_vl", "flashmask"), documents, row_of(documents)


@pytest.mark.parametrize("restart", [True, False])
def test_images_beside_positions_of_text_are_refused(restart):
    model, documents, row = qwen_row()
    lengths = [own["input_ids"].shape[1] for own in documents]
    positions = torch.cat([torch.arange(n) for n in (lengths if restart else [sum(lengths)])])[None]
    with pytest.raises(ValueError, match=r"position_ids \[B, S\] beside pixel_values .* pass none, or \[4, B, S\]"):
        model(**row, position_ids=positions)
    text = {"input_ids": torch.randint(6, 80, row["input_ids"].shape), "position_ids": positions}
    assert model(**text).logits.isfinite().all()


def test_positions_of_axes_pass_under_another_attention():
    """It finds documents in the first of four axes, and none in three."""
    model, documents, row = qwen_row()
    given = [dict(own, mm_token_type_ids=(own["input_ids"] == IMAGE).int()) for own in documents]
    keys = ("input_ids", "image_grid_thw", "mm_token_type_ids")
    axes = torch.cat([model.model.get_rope_index(**{key: own[key] for key in keys})[0] for own in given], -1)
    text = torch.cat([torch.arange(own["input_ids"].shape[1]) for own in documents])
    row = row | indices_of("documents", "qwen2_5_vl", documents) | {"use_cache": False}
    row.pop("mm_token_type_ids", None)
    four = torch.cat([text.expand(1, 1, -1), axes])
    want = torch.cat([model(**own).logits for own in documents], 1)
    for attention in ("flashmask", "sdpa"):
        model.set_attn_implementation(attention)
        assert_exact([model(**row, position_ids=four).logits], [want])
    with pytest.raises((ValueError, RuntimeError), match=r"'sdpa' ignores them"):
        model(**row, position_ids=axes)


def test_generation_from_images_takes_the_models_positions():
    model, (own, _), _ = qwen_row()
    given = dict(
        own, max_new_tokens=3, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(own["input_ids"]),
        suppress_tokens=[*SPECIAL.values()],  # a new image token has no image
    )  # fmt: skip
    got = [model.eval().generate(**given, use_cache=use_cache) for use_cache in (True, False)]
    model.set_attn_implementation("sdpa")
    assert all(torch.equal(x, model.generate(**given)) for x in got)
