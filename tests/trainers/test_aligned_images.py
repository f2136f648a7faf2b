"""DPO, GRPO and RLOO with image prompts: losses and gradients equal stock TRL's, and images are computed once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from datasets import Dataset
from tools.aligned_images import CASES, make, rows
from tools.processes import result, run_cases
from tools.support import rounding
from tools.tiny import EXACT, FLOAT32, FUSED_HEAD, TRAINER_WARNINGS, assert_same_gradients
from tools.vision import tiny_processor

from flashmask_hf.collators import DataCollatorForSharedQuestion
from flashmask_hf.trainers.images import SequenceImages, VisionPreferences

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]

MIXED = ([(2, 2)], [(2, 2)], [], [(2, 4)])
"""Two prompts of equal text with two images, one without an image, one with a larger image."""
SEVERAL = ([(2, 2)], [(2, 2)], [(2, 2), (2, 4)], [(2, 4)])

WHOLE: dict[str, Any] = {"per_device_train_batch_size": 8}
"""Two prompts in each micro-batch: stock TRL fails in one without any image."""

NO_TENSORS: dict[str, Any] = {"chat_template_kwargs": {"return_tensors": None}}
"""Lists of a batch's prompts, which a processor of Pixtral else makes a tensor: TRL does not pad them."""

QUICK: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "grpo, axes of positions": ("qwen2_5_vl", MIXED, WHOLE | {"beta": 0.1}),
    "grpo, padded images": ("smolvlm", SEVERAL, {"steps_per_generation": 4}),
    "rloo, images that see themselves": ("gemma3", MIXED, WHOLE | {"algorithm": "rloo", "beta": 0.1}),
    "dpo, axes of positions": ("qwen2_5_vl", MIXED, {"algorithm": "dpo", "reference": True}),
}

FULL: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{f"{name}, {kind}": (kind, MIXED, options) for kind in ("qwen3_vl", "gemma4", "idefics3", "llava_next", "llava")
       for name, options in {"grpo": WHOLE, "dpo": {"algorithm": "dpo", "lora": True}}.items()},
    "grpo, an adapter beside a frozen tower": ("llava", MIXED, WHOLE | {"lora": True, "beta": 0.1}),
    "dpo, images that see themselves": ("gemma3", SEVERAL, {"algorithm": "dpo"}),
    "grpo, tiles": ("internvl", SEVERAL, WHOLE),
    "dpo, tiles": ("internvl", SEVERAL, {"algorithm": "dpo"}),
    "dpo, padded images": ("smolvlm", MIXED, {"algorithm": "dpo"}),
    **{f"dpo, {kind}": (kind, MIXED, {"algorithm": "dpo"}) for kind in ("mistral3", "pixtral")},
    "grpo, mistral3": ("mistral3", MIXED, WHOLE | NO_TENSORS),
    "rloo, pixtral": ("pixtral", SEVERAL, WHOLE | NO_TENSORS | {"algorithm": "rloo"}),
    "dpo, accumulated": ("qwen2_5_vl", MIXED, {
        "algorithm": "dpo", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "float32": ("qwen2_5_vl", MIXED, WHOLE | {"dtype": torch.float32}),
    "tokens": ("qwen2_5_vl", SEVERAL, WHOLE | {"share": "tokens"}),
    "tokens, images that see themselves": ("gemma3", SEVERAL, {"share": "tokens", "algorithm": "rloo"}),
    "exact ratios": ("qwen2_5_vl", SEVERAL, {"steps_per_generation": 4, "exact_ratios": True}),
    "exact ratios, rloo": ("gemma3", SEVERAL, {"algorithm": "rloo", "exact_ratios": True}),
    "part of a group": ("qwen2_5_vl", SEVERAL, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}),
    "one micro-batch per prompt": ("qwen2_5_vl", MIXED, WHOLE | {"beta": 0.1, "ours": {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}}),
    "checkpointing, padded rows": ("qwen2_5_vl", SEVERAL, {"gradient_checkpointing": True, "pad_to_multiple_of": 8}),
}  # fmt: skip


def check(name: str, runs: dict[str, Any], out: Any) -> None:
    kind, images, options = runs[name]
    data = rows(*images, answers=options.get("algorithm") == "dpo")
    changes = {**options}
    for_ours = changes.pop("ours", {})
    ours = make(kind, data, out / "ours", True, **changes | for_ours)
    ours.train()
    stock = make(
        kind, data, out / "stock", False, **{x: changes[x] for x in changes if x not in ("share", "exact_ratios")}
    )
    stock.train()
    assert len(ours.kept.steps) == len(stock.kept.steps) == 1
    gradients, expected = ours.kept.steps[0], stock.kept.steps[0]
    assert options.get("lora") or any("vision" in parameter or "visual" in parameter for parameter in gradients)
    exact = rounding(1000) if "dtype" in options else EXACT  # sums of two layers, forward and backward
    assert_same_gradients(gradients, expected, exact)
    log, stock_log = ours.state.log_history[0], stock.state.log_history[0]
    for key in ("loss", "reward", "rewards/margins", "logps/chosen"):
        if key in stock_log and not for_ours:
            bound = max(exact, FLOAT32) if key == "loss" else exact
            assert log[key] == pytest.approx(stock_log[key], rel=bound, abs=bound), key
    assert 0.1 < log["shared_tokens_saved"] < 0.8
    assert 0 <= log["mask_sparsity"] < 1


@pytest.mark.parametrize("name", QUICK)
def test_gradients_equal_stock_trl(name, tmp_path):
    check(name, QUICK, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_more_gradients_equal_stock_trl(name, tmp_path, monkeypatch):
    if name == "float32":
        monkeypatch.undo()
    check(name, FULL, tmp_path)


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_the_tower_runs_once_per_prompt(algorithm, tmp_path):
    """In each model call it gets the patches of each prompt's image once, 32 of 2 x 4 cells and 16 of 2 x 2."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16}
    trainer = make(
        "qwen2_5_vl", rows(*MIXED, answers=algorithm == "dpo"), tmp_path, True, algorithm=algorithm, **options
    )
    patches: list[int] = []
    for model in filter(None, (trainer.model, trainer.ref_model)):
        model.model.visual.patch_embed.register_forward_hook(lambda layer, args, output: patches.append(len(output)))
    trainer.train()
    assert patches == [64] * (1 if algorithm == "grpo" else 2)


def test_prompts_with_other_images_and_images_of_completions_are_not_shared():
    pixels, types = torch.tensor([[1.0], [1.0], [2.0], [1.0]]), torch.zeros(4, 6, dtype=torch.int64)
    types[:, 1], types[3, 5] = 1, 1
    images = SequenceImages({"pixel_values": pixels, "token_type_ids": types}, {"num_images": [1] * 4})
    assert images.kinds([b"a"] * 4, keep=2) == [0, 0, 2, 3]
    assert images.kinds([b"a", b"b", b"a", b"a"], keep=2) == [0, 1, 2, 3]
    assert images.of([2, 0])["pixel_values"].tolist() == [[2.0], [1.0]]


def test_the_reader_of_preferences_goes_into_workers():
    read = pickle.loads(pickle.dumps(VisionPreferences(tiny_processor("llava"))))
    examples, pixels = read(list(rows([(2, 2)], [], answers=True)))
    assert [sorted(example["sizes"]) for example in examples] == [[], []]
    assert len(pixels["pixel_values"]) == 1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("paligemma", {}, "prompts are bidirectional"),
        ("paligemma", {"algorithm": "dpo"}, "prompts are bidirectional"),
        ("llava", {"algorithm": "dpo", "row_length": 64}, "row_length reorders examples"),
        ("llava", {"algorithm": "dpo", "processor": tiny_processor("llava").tokenizer}, "pass a processor"),
        ("llava", {"processor": tiny_processor("llava").tokenizer}, "pass a processor"),
        ("llava", {"processor": tiny_processor("llava")}, "pads on the right"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_shared_raises_at_construction(kind, options, message, tmp_path):
    options = {"beta": 0.0} | options if "algorithm" not in options else options | {"reference": True}
    with pytest.raises(ValueError, match=message):
        make(kind, rows(*SEVERAL, answers=options.get("algorithm") == "dpo"), tmp_path, True, **options)


def in_form(data: Dataset, form: str) -> Dataset:
    """Return preferences, of strings as contents of messages, in another format."""
    prompts, answers = list(data["prompt"]), {name: list(data[name]) for name in ("chosen", "rejected")}
    if form == "answers of text":
        answers = {name: [answer[0]["content"] for answer in own] for name, own in answers.items()}
    else:
        answers = {name: [[*x, *y] for x, y in zip(prompts, own, strict=True)] for name, own in answers.items()}
    columns: dict[str, Any] = {"prompt": prompts, "images": data["images"], **answers}
    if form == "prompt of text":
        columns["prompt"] = [prompt[0]["content"] for prompt in prompts]
    if form == "no prompt":
        del columns["prompt"]
    return Dataset.from_dict(columns)


@pytest.mark.parametrize("form", ["prompt repeated", "prompt of text", "no prompt", "answers of text"])
def test_preferences_with_images_may_have_any_format(form, tmp_path):
    losses = []
    data = rows(*MIXED, answers=True)
    for own in (data, in_form(data, form)):
        trainer = make("llava", own, tmp_path, True, algorithm="dpo")
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == losses[1]


def test_a_stream_of_preferences_may_begin_without_an_image(tmp_path):
    data = rows([], [(2, 2)], [(2, 4)], answers=True)
    losses = []
    for own in (data, data.to_iterable_dataset()):
        trainer = make("llava", own, tmp_path, True, algorithm="dpo")
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=FLOAT32)  # in another order


@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_wrong_preferences_with_images_raise_at_construction(streamed, tmp_path):
    data = rows(*SEVERAL, answers=True)
    late = [None, None, None, "w7 w8"]
    wrong = [
        (data.add_column("system", late[::-1]), "example 0 has a column 'system' beside its prompt, which is not read"),
        (data.rename_column("chosen", "won"), "example 0 has no chosen, or an empty one; remove it, or rename"),
        (data.add_column("weight", [1.0] * 4), "loss_type='aot' is no mean over pairs, which weights need"),
    ]
    if not streamed:
        wrong.append((data.add_column("system", late), "example 3 has a column 'system' beside its prompt"))
    for own, problem in wrong:
        loss = {"loss_type": ["aot"]} if "aot" in problem else {}
        with pytest.raises(ValueError, match=problem):
            make("llava", own.to_iterable_dataset() if streamed else own, tmp_path, True, algorithm="dpo", **loss)


@FUSED_HEAD
def test_wrong_weights_raise_at_construction(tmp_path):
    for weight, problem in ((None, "has no weight, but example 0"), (-1.0, "must be at least 0, got -1; swap")):
        data = rows(*SEVERAL, answers=True).add_column("weight", [1.0, weight, 2.0, 1.0])
        with pytest.raises(ValueError, match=f"example 1 of the train dataset, as prepared, {problem}"):
            make("llava", data, tmp_path, True, algorithm="dpo")


def test_images_are_never_cut():
    read = VisionPreferences(tiny_processor("llava"))
    with pytest.raises(ValueError, match="'keep_end' would cut images"):
        DataCollatorForSharedQuestion(read_images=read, max_length=8, truncation_mode="keep_end")
    collator = DataCollatorForSharedQuestion(read_images=read, max_length=8, truncation_mode="keep_start")
    with pytest.raises(
        ValueError,
        match="has 10 tokens and fills max_length 8; raise it, or remove the ex",
    ):
        collator(list(rows([(2, 2)], answers=True)))


@pytest.fixture(scope="module")
def found(run_folder):
    return run_cases(run_folder, "tools.aligned_images", (1, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_ranks_without_images_train(found, name):
    want, got = (result(found, size, name) for size in (1, 2))
    assert got["losses"] == pytest.approx(want["losses"], rel=FLOAT32, abs=FLOAT32)
    assert got["norms"] == pytest.approx(want["norms"], rel=EXACT)
