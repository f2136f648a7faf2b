"""PackedSFTTrainer on examples with images: losses, gradients and rows equal TRL's on the examples alone."""

import copy
import math
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import compare_versions
from datasets import Dataset, Features, Image, Json, List, Value, concatenate_datasets
from peft import LoraConfig
from tools.aligned_images import Gradients
from tools.processes import result, run_cases
from tools.support import rounding
from tools.tiny import CHECKPOINTING, EXACT, FLOAT32, TRAINER_WARNINGS, assert_same_gradients, trainer_settings
from tools.vision import KINDS, conversations, picture, tiny_model, tiny_processor
from tools.vision_cases import CASES
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from flashmask_hf.collators import DataCollatorForPackedVisionLanguageModeling, RopeIndex
from flashmask_hf.trainers import LongRows, PackedSFTTrainer, image_rows
from flashmask_hf.trainers.image_rows import RowCollator
from flashmask_hf.trainers.towers import run_tower_in_every_call

pytestmark = [*TRAINER_WARNINGS, pytest.mark.usefixtures("float64")]

DATA: Any = conversations(1, 0, 2, 1, 0, 2, 0, 1)

_TURNS = [("user", [{"type": "video", "text": None}]), ("assistant", [{"type": "text", "text": "w7"}])]
FILM = Dataset.from_list([{"images": [], "messages": [{"role": x, "content": y} for x, y in _TURNS]}], DATA.features)
"""A conversation with a video."""

GIVEN = ("data_collator", "eval_dataset", "formatting_func", "max_image_tokens", "peft_config", "split")
"""Arguments of the trainer; other options are of its config."""


def trainer_of(
    out: Any,
    kind: str = "qwen3_vl",
    trainer: Any = PackedSFTTrainer,
    data: Any = DATA,
    attention="flashmask",
    dtype=torch.float64,
    **options,
) -> Any:
    given = {name: options.pop(name) for name in GIVEN if name in options}
    settings = trainer_settings(out) | {"max_steps": 1, "learning_rate": 1e-9, "max_grad_norm": 0, "max_length": 128}
    return trainer(
        tiny_model(kind, attention, dtype),
        SFTConfig(**settings | {"per_device_train_batch_size": 8, "optim": "sgd"} | options),
        train_dataset=data,
        processing_class=tiny_processor(kind),
        **given,
    )


def trained(*args, accumulates_rows=False, **options):
    """Return a trainer after training, its log entries and its gradients. A step may have all rows of the dataset."""
    trainer, gradients = trainer_of(*args, **options), Gradients()
    if accumulates_rows:
        trainer.args.gradient_accumulation_steps = len(trainer.train_dataset)
    trainer.add_callback(gradients)
    trainer.train()
    return trainer, [entry for entry in trainer.state.log_history if "loss" in entry], gradients.steps


FAMILIES = [
    pytest.param(kind, marks=[] if kind == "qwen3_vl" else [pytest.mark.full])
    for kind in KINDS
    if kind not in ("qwen3_5", "paligemma")  # needs kernels of a GPU; needs images
]
DTYPES = [pytest.param(*family.values, torch.float64, marks=family.marks) for family in FAMILIES]
DTYPES.append(pytest.param("qwen3_vl", torch.float32, marks=[pytest.mark.full]))


@pytest.mark.parametrize(("kind", "dtype"), DTYPES, ids=str)
def test_loss_and_gradients_equal_trls(tmp_path, kind, dtype, monkeypatch):
    """Gradients are accumulated over rows, which together have the learned tokens of TRL's padded batch."""
    if dtype == torch.float32:
        monkeypatch.undo()
    bound = EXACT if dtype == torch.float64 else rounding(1000)  # sums of two layers, forward and backward
    stock = trained(tmp_path, kind, SFTTrainer, attention="eager", dtype=dtype, max_length=None)
    packed = trained(tmp_path, kind, dtype=dtype, per_device_train_batch_size=1, max_length=130, accumulates_rows=True)
    assert len(packed[0].train_dataset) > 1
    before, after, expected, found = stock[1][0], packed[1][0], stock[2][0], packed[2][0]
    assert after["loss"] == pytest.approx(before["loss"], rel=max(bound, FLOAT32))
    assert after["num_tokens"] == before["num_tokens"]
    assert_same_gradients(found, expected, bound)


@pytest.mark.full
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_a_resumed_run_reads_the_rows_that_are_left(tmp_path, streamed):
    data = DATA.to_iterable_dataset(num_shards=2) if streamed else DATA
    options = {
        "data": data,
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "max_length": 60,
        "learning_rate": 0.05,
        "save_strategy": "steps",
        "save_steps": 2,
        "dataloader_num_workers": 1,
    }
    whole, entries, _ = trained(tmp_path, **options)
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [entry["loss"] for entry in resumed.state.log_history if "loss" in entry] == [x["loss"] for x in entries]
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="max_image_tokens must be None, as in the checkpoint, got 50"):
        trainer_of(tmp_path, **options, max_image_tokens=50).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
def test_evaluation_and_prediction_pack_raw_examples(tmp_path):
    """Their loss is the mean over learned tokens, with and without images."""
    model, processor = tiny_model("qwen3_vl"), tiny_processor("qwen3_vl")
    collator = DataCollatorForPackedVisionLanguageModeling(processor, rope_index=RopeIndex.of(model))
    batches = [collator([example]) for example in DATA]
    tokens = [(batch["labels"] != -100).sum().item() for batch in batches]
    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss.item() for batch in batches]
    expected = sum(loss * n for loss, n in zip(losses, tokens, strict=True)) / sum(tokens)
    text = Dataset.from_list([{"messages": DATA[1]["messages"]}])
    trainer = trainer_of(tmp_path, eval_dataset={"both": DATA, "text": text}, per_device_eval_batch_size=1)
    found = trainer.evaluate()
    assert found["eval_both_loss"] == pytest.approx(expected, rel=FLOAT32)
    assert found["eval_text_loss"] == pytest.approx(losses[1], rel=FLOAT32)
    assert trainer.evaluate(DATA.to_iterable_dataset())["eval_loss"] == pytest.approx(expected, rel=FLOAT32)
    assert trainer.evaluate({"text": text})["eval_text_loss"] == pytest.approx(losses[1], rel=FLOAT32)
    prediction = trainer.predict(text)
    assert prediction.metrics["test_loss"] == pytest.approx(losses[1], rel=FLOAT32)
    assert prediction.predictions.shape[:2] == (1, batches[1]["input_ids"].shape[1])


@pytest.mark.full
def test_only_the_language_models_adapter_is_trained(tmp_path):
    lora = LoraConfig(target_modules=r".*language_model.*(q|v)_proj", init_lora_weights=False)
    results = []
    for kind, attention in ((SFTTrainer, "sdpa"), (PackedSFTTrainer, "flashmask")):
        torch.manual_seed(0)
        checkpointed = {CHECKPOINTING: True}
        run = trained(tmp_path, trainer=kind, attention=attention, peft_config=lora, max_length=320, **checkpointed)
        results.append((run[1][0]["loss"], run[2][0]))
    (loss, expected), (other, found) = results
    assert other == pytest.approx(loss, rel=FLOAT32)
    assert all("lora" in name and "language_model" in name for name in found)
    assert_same_gradients(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("option", ["assistant_only_loss", "completion_only_loss"])
def test_answers_alone_are_learned(tmp_path, option):
    if option == "completion_only_loss":
        rows = [
            {"images": row["images"], "prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in DATA
        ]
        data, options = Dataset.from_list(rows), {}
    else:
        data, options = DATA, {option: True}
    (before, after) = (
        trained(tmp_path, trainer=kind, data=data, attention=attention, max_length=320, **options)[1][0]
        for kind, attention in ((SFTTrainer, "sdpa"), (PackedSFTTrainer, "flashmask"))
    )
    assert after["loss"] == pytest.approx(before["loss"], rel=FLOAT32)


def test_rows_are_reported_and_counted(tmp_path, capsys):
    trainer, entries, _ = trained(
        tmp_path, max_length=320, include_num_input_tokens_seen="non_padding", pad_to_multiple_of=64
    )
    printed = capsys.readouterr().out
    assert "Packed 8 train examples into 1 rows of up to 320 tokens" in printed
    lengths = trainer.train_dataset["seq_lengths"][0]
    assert entries[0]["num_tokens"] == trainer.state.num_input_tokens_seen == sum(lengths)
    keys = sum(n * (n + 1) / 2 for n in lengths) / sum(lengths)
    assert entries[0]["keys_per_token"] == pytest.approx(keys, abs=0.05)
    assert entries[0]["mask_sparsity"] > 0
    assert trainer.data_collator([trainer.train_dataset[0]])["input_ids"].shape[1] == -(-sum(lengths) // 64) * 64


def test_a_batch_may_be_a_row(tmp_path):
    trainer, entries, _ = trained(tmp_path, dataset_kwargs={"skip_prepare_dataset": True})
    assert trainer.train_dataset is DATA
    assert entries[0]["loss"] == pytest.approx(trained(tmp_path, max_length=320)[1][0]["loss"], rel=FLOAT32)


def test_your_collator_gets_what_it_lacks_of_model_and_arguments(tmp_path):
    given = DataCollatorForPackedVisionLanguageModeling(tiny_processor("qwen3_vl"), completion_only_loss=True)
    trainer = trainer_of(tmp_path, data_collator=given, assistant_only_loss=True)
    assert isinstance(trainer.data_collator, RowCollator)
    assert trainer.data_collator.collator.rope_index is not None
    alone = trainer.data_collator.collator.collator
    assert (alone.assistant_only_loss, alone.completion_only_loss) == (True, True)
    assert alone.max_length is None  # TRL's collator would cut examples
    given = DataCollatorForPackedVisionLanguageModeling(tiny_processor("qwen3_vl"), collator=alone)
    assert trainer_of(tmp_path, data_collator=given).data_collator.collator.collator is alone


@pytest.mark.skipif(compare_versions("trl", "<", "1.15"), reason="TRL 1.14 reads no images inside of messages")
def test_images_inside_of_messages_are_read(tmp_path):
    """Of a later row, beside a column of images that is empty throughout; TRL takes the column for images."""
    picture(2, 4).save(tmp_path / "a.png")

    def loss_of(part: dict[str, str], images: list[str]) -> float:
        contents = [[{"type": "text", "text": "w6"}], [part, {"type": "text", "text": "w7"}]]
        answer = {"role": "assistant", "content": [{"type": "text", "text": "w8"}]}
        turns = [[{"role": "user", "content": content}, answer] for content in contents]
        data = Dataset.from_dict({"messages": turns, "images": [[], images]})
        return trained(tmp_path, data=data.cast_column("images", List(Image())))[1][0]["loss"]

    path = str(tmp_path / "a.png")
    assert loss_of({"type": "image", "image": path}, []) == loss_of({"type": "image"}, [path])


@pytest.mark.parametrize("streamed", [False, True], ids=["map", "streamed"])
def test_contents_stored_as_json_are_read_and_images_stay_encoded(tmp_path, monkeypatch, streamed):
    measured, size_of = set(), image_rows._size_of
    monkeypatch.setattr(image_rows, "_size_of", lambda image: measured.add(type(image)) or size_of(image))
    found, lengths_of = [], image_rows.ExampleLengths.__call__

    def watched(lengths: Any, *args: Any) -> tuple[int, int]:
        found.append(lengths_of(lengths, *args))
        return found[-1]

    monkeypatch.setattr(image_rows.ExampleLengths, "__call__", watched)
    for row in (rows := list(DATA.select(range(3)))):
        row["messages"][0]["content"].append({"type": "text", "text": "w6"})  # JSON joins it to the part before
    data = Dataset.from_list(rows, DATA.features)
    features = Features({**data.features, "messages": List({"role": Value("string"), "content": Json()})})
    losses = []
    for own in (data, Dataset.from_list(rows, features)):
        own = own.to_iterable_dataset() if streamed else own
        losses.append(trained(tmp_path, data=own, max_length=320)[1][0]["loss"])
    assert losses[0] == losses[1]
    assert found[:3] == found[3:]
    assert measured == {dict}


WRONG: dict[str, Any] = {
    "split": ({"split": True}, "split=True with a dataset of images: images are never cut; leave it out"),
    "shards": (
        {"parallelism_config": ParallelismConfig(cp_size=2)},
        r"cp_size > 1 \(parallelism_config\) with a dataset of images: an image's tokens would be on several ranks",
    ),
    "packing": ({"packing": True}, "Packing is not supported for vision datasets"),
    "formatting": ({"formatting_func": str}, "formatting_func with a dataset of images: TRL does not read it"),
    "another length": (
        {"data_collator": DataCollatorForPackedVisionLanguageModeling(tiny_processor("qwen3_vl"), max_length=70)},
        "max_length of data_collator must be None or args.max_length, 128, got 70; leave it out",
    ),
    "unread limit": (
        {"max_image_tokens": 8, "dataset_kwargs": {"skip_prepare_dataset": True}},
        "max_image_tokens needs rows with images that this trainer packs; leave it or skip_prepare_dataset out",
    ),
    "limit of text": (
        {"max_image_tokens": 8, "data": Dataset.from_list([{"messages": DATA[1]["messages"]}])},
        "max_image_tokens needs rows with images",
    ),
    "no length": ({"max_length": None}, "max_length is None, but packing needs it"),
    "short": ({"max_length": 8}, "example 0 of the train dataset has .* tokens, .* but max_length is 8"),
    "video": (
        {"data": Dataset.from_list([{"video": "a", "images": DATA[0]["images"], "text": "w5"}])},
        "has images, video or audio in its column 'video', but this trainer packs text and images",
    ),
    "video in messages": (
        {"data": concatenate_datasets([DATA, FILM])},
        "example 8 of the train dataset has images, video or audio in its column 'messages', but this trainer packs",
    ),
    "video in a text": (
        {"data": Dataset.from_dict({"images": [[DATA[0]["images"][0]], []], "text": ["<image> w5", "w6 <video> w7"]})},
        r"example 1 of the train dataset has video \(<video>\), which TRL's collator does not read; remove it",
    ),
    "tools": (
        {"data": DATA.add_column("tools", [None, [], *[["a"]] * 6])},
        "example 2 of the train dataset has a column tools, which TRL does not read with images; write it into a "
        "column messages, and remove it",
    ),
    "tools of a stream": (
        {"data": DATA.add_column("tools", ["a"] * 8).to_iterable_dataset()},
        "example 0 of the train dataset has a column tools",
    ),
    "system": ({"data": DATA.add_column("system", ["w99"] * 8)}, "has a column 'system' beside its prompt"),
    "transform": ({"data": DATA.with_transform(lambda batch: batch)}, "the train dataset has a transform"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_set_ups_raise(tmp_path, wrong):
    options, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **options)


def test_long_rows_with_images_are_not_measured(tmp_path):
    trainer = trainer_of(tmp_path, **{CHECKPOINTING: True})
    with pytest.raises(ValueError, match="rows with images cannot be invented; set keep_attention and host_gib by"):
        LongRows(trainer)
    trainer.add_callback(LongRows(trainer, keep_attention=True, host_gib=1))
    trainer.train()


@pytest.mark.parametrize("kwargs", [None, {"skip_prepare_dataset": True}], ids=["packed", "a batch is a row"])
def test_a_weight_beside_images_raises(tmp_path, kwargs):
    weighed = DATA.add_column("weight", [0.0] + [1.0] * 7)
    for data in (weighed, weighed.to_iterable_dataset()):
        with pytest.raises(
            ValueError, match="a column weight with a dataset of images: the loss does not read it; repeat"
        ):
            trainer_of(tmp_path, data=data, dataset_kwargs=kwargs)
    late = DATA.add_column("weight", [None] * 7 + [1.0])
    with pytest.raises(ValueError, match="has a weight, which is not read with images; rename or remove the column"):
        trainer_of(tmp_path, data=late, dataset_kwargs=kwargs, max_length=320).train()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_call_without_images_runs_the_tower_for_nothing(kind):
    """Each weight that a call with an image trains gets a gradient, zero in the tower; others stay without."""
    collator = DataCollatorForVisionLanguageModeling(tiny_processor(kind))
    batch = collator([DATA[0]])
    model = tiny_model(kind)
    text = {"input_ids": batch["input_ids"][:, -3:], "labels": batch["input_ids"][:, -3:]}
    if "token_type_ids" in batch:
        text["token_type_ids"] = torch.zeros_like(text["input_ids"])
    runs = []
    for inputs, hooked in ((batch, False), (text, False), (text, True)):
        if hooked:
            run_tower_in_every_call(model, collator.processor)
        model.zero_grad()
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        runs.append((loss, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}))
    (_, expected), (loss, before), (same_loss, after) = runs
    assert torch.equal(loss, same_loss)
    assert expected.keys() == after.keys() > before.keys()
    for name, gradient in after.items():
        assert torch.equal(gradient, before.get(name, torch.zeros_like(gradient)))


def test_a_tower_that_overflows_changes_no_text():
    """In float16 the features of the blank image may be infinite."""
    model, text = tiny_model("llava"), {"input_ids": torch.tensor([[5, 6, 7]])}
    torch.nn.init.constant_(model.model.multi_modal_projector.linear_2.bias, math.inf)
    logits = model(**text).logits
    run_tower_in_every_call(model, tiny_processor("llava"))
    assert torch.equal(model(**text).logits, logits)


def test_generation_runs_the_tower_once():
    model, text = tiny_model("llava").eval(), {"input_ids": torch.tensor([[5, 6, 7]])}
    tokens = model.generate(**text, max_new_tokens=3, do_sample=False)
    run_tower_in_every_call(model, tiny_processor("llava"))
    runs: list[Any] = []
    model.model.vision_tower.register_forward_hook(lambda *call: runs.append(call))
    assert torch.equal(model.generate(**text, max_new_tokens=3, do_sample=False), tokens)
    assert len(runs) == 1


def test_two_trainers_and_a_copy_run_the_tower_once_per_call():
    model, text = tiny_model("llava"), {"input_ids": torch.tensor([[5, 6, 7]])}
    for _ in range(2):
        run_tower_in_every_call(model, tiny_processor("llava"))
    copied = copy.deepcopy(model)
    run_tower_in_every_call(copied, tiny_processor("llava"))
    runs: list[Any] = []
    for one in (model, copied):
        one.model.vision_tower.register_forward_hook(lambda module, *call: runs.append(module))
        one(**text)
    assert runs == [model.model.vision_tower, copied.model.vision_tower]


@pytest.fixture(scope="module")
def found(run_folder):
    return run_cases(run_folder, "tools.vision_cases", (1, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_ranks_without_images_train(found, name):
    """Without a run of its tower, a rank would miss collectives of the others."""
    want, got = (result(found, size, name) for size in (1, 2))
    assert got["losses"] == pytest.approx(want["losses"], rel=FLOAT32)
    assert got["norms"] == pytest.approx(want["norms"], rel=EXACT)
