"""Rows of examples with images: their lengths equal the collator's, and no image is decoded for them."""

import base64
import copy
import itertools
import zipfile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, List, Value, load_from_disk
from datasets import Image as ImageFeature
from PIL import ExifTags, Image, ImageFile
from tools.vision import KINDS, conversations, picture, tiny_processor
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from flashmask_hf.collators.bins import best_fit_decreasing
from flashmask_hf.trainers import image_rows
from flashmask_hf.trainers.image_rows import ExampleLengths, RowCollator, _size_of, pack_examples

TURNS = [{"role": "user", "content": "w6 w7"}, {"role": "assistant", "content": "w8"}]
FORMS = {
    "messages": {"messages": TURNS},
    "text": {"text": "w6 <image> w7"},
    "prompt": {"prompt": "w6 <image> w7", "completion": "w8"},
    "conversational prompt": {"prompt": TURNS[:1], "completion": TURNS[1:]},
}


def collator_of(kind="qwen3_vl"):
    return DataCollatorForVisionLanguageModeling(tiny_processor(kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "paligemma"])
def test_lengths_equal_the_collators(kind):
    collator = collator_of(kind)
    lengths = ExampleLengths(collator)
    processed = mock.Mock(side_effect=lengths._processed)
    lengths._processed = processed
    examples: Any = conversations(0, 1, 2)
    for example in examples:
        length, images = lengths(example)
        assert length == collator([dict(example)])["input_ids"].shape[1]
        assert bool(images) == bool(example["images"])
    # SmolVLM's processor has no method of lengths, and the tokenizer of the tests no line breaks, as Idefics3 needs.
    assert bool(processed.call_count) == (kind in ("smolvlm", "idefics3"))


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
def test_a_limit_of_pixels_that_is_set_after_loading_counts():
    collator: Any = collator_of("qwen2_5_vl")
    collator.processor = copy.deepcopy(collator.processor)
    collator.processor.image_processor.size = {"shortest_edge": 64, "longest_edge": 2**20}
    collator.processor.image_processor.max_pixels = 2**14
    example = {"text": "w6 <image>", "images": [picture(32, 32)]}
    tokens = collator([dict(example)])["input_ids"].shape[1]  # transformers 5.17 does not read the limit
    assert ExampleLengths(collator)(example) == (tokens, tokens - 1)


def test_tiles_of_an_image_alone_are_not_counted_for_several():
    collator = DataCollatorForVisionLanguageModeling(tiny_processor("llava_onevision"))
    lengths = ExampleLengths(collator)
    for count in (1, 2, 3):
        example = {"text": "w6 " + "<image> " * count, "images": [picture(2, 2)] * count}
        assert lengths(example)[0] == collator([dict(example)])["input_ids"].shape[1] == 1 + count * (5, 24)[count == 1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("column", ["image", "images"])
def test_examples_have_each_of_trls_forms(form, column):
    image = picture(2, 3)
    example = FORMS[form] | {column: image if column == "image" else [image]}
    expected = collator_of()([dict(example)])["input_ids"].shape[1]
    assert ExampleLengths(collator_of())(example) == (expected, 6)


@pytest.mark.parametrize("shape", [(24, 16, 3), (3, 24, 16)], ids=str)
def test_arrays_count(shape):
    collator: Any = collator_of()
    for image in (np.zeros(shape, np.uint8), torch.zeros(shape, dtype=torch.uint8)):
        example = {"text": "<image> w6", "images": [image]}
        assert ExampleLengths(collator)(example) == (collator([dict(example)])["input_ids"].shape[1], 6)


def test_images_in_messages_count():
    question = {"role": "user", "content": [{"type": "image", "image": picture(2, 2)}, {"type": "text", "text": "w6"}]}
    example = {"messages": [question, TURNS[1]], "images": []}
    assert ExampleLengths(collator_of())(example)[1] == 4


@pytest.mark.parametrize("orientation", [None, 3, 6])
@pytest.mark.parametrize("kind", ["jpeg", "tiff"])
def test_the_size_of_a_file_is_the_decoded_images(tmp_path, orientation, kind):
    """Exif turns the image by 180 or 90 degrees."""
    path, exif = tmp_path / f"x.{kind}", Image.Exif()
    if orientation:
        exif[ExifTags.Base.Orientation] = orientation
    Image.new("RGB", (30, 20)).save(path, exif=exif)
    decoded = ImageFeature().decode_example({"path": str(path), "bytes": None})
    code = f"data:image/{kind};base64," + base64.b64encode(path.read_bytes()).decode()
    for image in (str(path), {"path": str(path), "bytes": None}, {"path": None, "bytes": path.read_bytes()}, code):
        assert _size_of(image) == _size_of(decoded) == ((30, 20) if orientation == 6 else (20, 30))


def test_an_image_in_an_archive_has_the_size_of_its_file(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "x.png")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.write(tmp_path / "x.png", "x.png")
    assert _size_of({"path": f"zip://x.png::{tmp_path / 'x.zip'}", "bytes": None}) == (20, 30)


def test_rows_are_packed_without_decoding_and_hold_raw_examples(monkeypatch):
    data: Any = conversations(1, 0, 2, 0, 1)
    expected = [collator_of()([dict(example)])["input_ids"].shape[1] for example in data]
    with monkeypatch.context() as patches:
        patches.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("an image is decoded"))
        rows = pack_examples(data, collator_of(), 60)
    assert sorted(itertools.chain(*rows["seq_lengths"])) == sorted(expected)
    assert max(map(sum, rows["seq_lengths"])) <= 60
    examples = [example for row in rows for example in row["examples"]]
    assert sorted(len(example["images"]) for example in examples) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("feature", [Value("string"), ImageFeature()], ids=str)
@pytest.mark.parametrize("column", ["image", "images"])
def test_cached_lengths_are_measured_again_if_a_file_changes(tmp_path, feature, column, monkeypatch):
    path = str(tmp_path / "x.png")
    features = Features({column: feature if column == "image" else List(feature), "text": Value("string")})
    row = {column: path if column == "image" else [path], "text": "<image>"}
    picture(2, 2).save(path)
    Dataset.from_list([row]).save_to_disk(tmp_path / "data")
    data = load_from_disk(tmp_path / "data").cast(features)
    assert pack_examples(data, collator_of(), 60)["seq_lengths"] == [[4]]
    with monkeypatch.context() as patches:
        patches.setattr(image_rows, "_size_of", lambda _: pytest.fail("the cache is not read"))
        assert pack_examples(data, collator_of(), 60)["seq_lengths"] == [[4]]
    picture(3, 3).save(path)
    assert pack_examples(data, collator_of(), 60)["seq_lengths"] == [[9]]


@pytest.mark.parametrize("window", [3, 1_000])
@pytest.mark.parametrize("from_generator", [True, False])
def test_streams_pack_the_same_rows(from_generator, window, monkeypatch):
    monkeypatch.setattr(image_rows, "_WINDOW", window)
    monkeypatch.setattr(image_rows, "_STREAMED_WINDOW", window)
    data: Any = conversations(1, 0, 2, 0, 1)
    stream = IterableDataset.from_generator(lambda: iter(data)) if from_generator else data.to_iterable_dataset()
    rows, expected = [*pack_examples(stream, collator_of(), 60)], [*pack_examples(data, collator_of(), 60)]
    assert len(rows) == len(expected) > 1
    assert sum(len(row["examples"]) for row in rows) == len(data)
    for row, other in zip(rows, expected, strict=True):
        assert [one["messages"] for one in row["examples"]] == [one["messages"] for one in other["examples"]]
        images = [image for one in row["examples"] for image in one["images"]]
        others = [image for one in other["examples"] for image in one["images"]]
        assert all(np.array_equal(one, other) for one, other in zip(images, others, strict=True))


def test_a_row_has_at_most_so_many_image_tokens():
    data = Dataset.from_dict({"image": [picture(2, 2) for _ in range(5)], "text": ["<image> w6"] * 5})
    assert len(pack_examples(data, collator_of(), 25)) == 1
    assert [len(row["examples"]) for row in pack_examples(data, collator_of(), 25, max_image_tokens=9)] == [2, 2, 1]
    with pytest.raises(ValueError, match=r"example 0 .* has 5 tokens, 4 of them .* max_image_tokens is 3; raise it"):
        pack_examples(data, collator_of(), 25, max_image_tokens=3)
    with pytest.raises(ValueError, match="max_image_tokens must be"):
        pack_examples(data, collator_of(), 25, max_image_tokens=0)
    with pytest.raises(ValueError, match=r"example 0 of the train dataset has 5 tokens, .* but max_length is 4"):
        next(iter(pack_examples(data.to_iterable_dataset(), collator_of(), 4)))


def test_a_late_row_with_a_column_that_trl_ignores_raises():
    data: Any = conversations(1, 0, 1).add_column("chat_template_kwargs", [None, None, {"extra": True}])
    for rows in (data, data.to_iterable_dataset()):
        with pytest.raises(ValueError, match="example 2 of the train dataset has a column chat_template_kwargs, which"):
            list(pack_examples(rows, collator_of(), 60))


UNREADABLE: dict[str, Any] = {
    "broken": ({"image": {"bytes": b"x", "path": None}, "text": "<image>"}, "UnidentifiedImageError: .*"),
    "missing": ({"image": {"bytes": None, "path": "/no.png"}, "text": "<image>"}, "FileNotFoundError: .*/no.png.*"),
    "placeholders": ({"image": picture(2, 2), "text": "<image> <image>"}, r"2 placeholders \(<image>\) for 1 images"),
    "role": ({"images": [], "messages": [{"role": "model", "content": "w6"}]}, "ValueError: Invalid role.*"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_example_that_cannot_be_read_is_named(case):
    example, problem = UNREADABLE[case]
    with pytest.raises(ValueError, match=f"^an example .*{problem}; correct it, or remove it: dataset.filter"):
        ExampleLengths(collator_of())(example)


def test_an_empty_example_raises():
    with pytest.raises(ValueError, match=r"example 1 of the train dataset is empty; remove it: dataset\.filter"):
        pack_examples(Dataset.from_dict({"text": ["w6", ""], "images": [[], []]}), collator_of(), 8)


def test_text_that_names_a_video_is_text_where_it_is_no_token(monkeypatch):
    data = Dataset.from_dict({"text": ["w6", "w6 <video> w7"], "images": [[], []]})
    collator = collator_of()
    for rows in (data, data.to_iterable_dataset()):
        with pytest.raises(ValueError, match=r"example 1 of the train dataset has video \(<video>\), which"):
            list(pack_examples(rows, collator, 8))
    monkeypatch.setattr(collator.processor, "video_token", "<clip>")
    data = Dataset.from_dict({"text": ["w6 <clip> w7"], "images": [[]]})
    assert pack_examples(data, collator, 8)["seq_lengths"] == [[3]]


def test_weights_limit_bins():
    assert best_fit_decreasing([5, 3, 4, 2, 1], 8, [1, 1, 0, 1, 0], 1) == [[0], [1, 2, 4], [3]]


def test_a_batch_longer_than_computed_raises():
    collator = RowCollator(mock.Mock(return_value={"input_ids": torch.zeros(1, 9)}, pad_to_multiple_of=3), 4)
    assert collator([{}, {}])["input_ids"].numel() == 9
    with pytest.raises(ValueError, match=r"1 rows of up to 4 tokens has 9: .* Set dataset_kwargs={'skip_prepare"):
        collator([{}])


def test_a_processor_without_an_image_token_raises():
    with pytest.raises(ValueError, match=r"SimpleNamespace has no image_token, .*'skip_prepare_dataset'"):
        ExampleLengths(SimpleNamespace(processor=SimpleNamespace()))
