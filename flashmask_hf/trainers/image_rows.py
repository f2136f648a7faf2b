"""Rows of examples with images, packed by lengths that need no decoded image."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import transformers
from datasets import Dataset, IterableDataset
from datasets import Image as ImageFeature
from datasets.fingerprint import Hasher
from torch import Tensor
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages
from trl.trainer.utils import global_then_local_main_first

from flashmask_hf.collators.bins import best_fit_decreasing
from flashmask_hf.collators.dataset import EXAMPLE, refuse_transform, whole
from flashmask_hf.collators.images import images_of, media_tokens
from flashmask_hf.collators.packing import as_count
from flashmask_hf.trainers.data_checks import IMAGES, decoding

EXAMPLES = "examples"
"""Column of a packed row with its raw examples, for `DataCollatorForPackedVisionLanguageModeling`."""

_UNREAD = ("tools", "chat_template_kwargs", "conversations")
"""Columns that TRL reads only in datasets without images."""

_WINDOW, _STREAMED_WINDOW = 4_000, 1_000
"""Number of examples of a Dataset, and of a stream, that are packed together."""

_PROBES = ((64, 64), (64, 128), (128, 64))
"""Height and width of the images whose tokens are compared with the processor's numbers."""


class ExampleLengths:
    """Computes the number of tokens of raw examples from their text and the headers of their images.

    The processor's `_get_num_multimodal_tokens` says how many tokens an image has, without the tokens around them. A
    processor without the method, or that contradicts it for blank images, processes a blank image of each size.

    Args:
        collator: TRL's `DataCollatorForVisionLanguageModeling`; a ValueError if its processor has no `image_token`.
    """

    def __init__(self, collator: Any):
        self._collator, self._processor = collator, collator.processor
        self._mark: Any = getattr(self._processor, "image_token", None)
        if self._mark is None:
            raise ValueError(
                f"{type(self._processor).__name__} has no image_token, so lengths are unknown; set dataset_kwargs="
                "{'skip_prepare_dataset': True}, and a row is one batch of examples"
            )
        self._media = media_tokens(self._processor)
        self._counts: dict[tuple[int, int, bool], int] = {}
        # LLaVA-OneVision cuts an image into tiles only where it is alone, so it returns numbers of images.
        image_processor = getattr(self._processor, "image_processor", None)
        self._needs_images = "batch_num_images" in getattr(image_processor, "model_input_names", ())
        # Qwen-VL reads these attributes when it processes an image, and not when it says how many tokens it has.
        known = getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", ())
        limits = {name: getattr(image_processor, name, None) for name in ("min_pixels", "max_pixels") if name in known}
        self._pixels = {name: limit for name, limit in limits.items() if limit is not None}
        probes = _PROBES if hasattr(self._processor, "_get_num_multimodal_tokens") else ()
        if probes and self._pixels:  # which older versions of transformers do not read at all
            probes += ((math.isqrt(2 * max(self._pixels.values())),) * 2,)
        around = {self._processed(size) - self._estimated(size) for size in probes}
        self._around = around.pop() if len(around) == 1 else None

    def __call__(self, example: Mapping[str, Any], name: str = "an example") -> tuple[int, int]:
        """Return the numbers of tokens and of image tokens of an example, which errors call `name`."""
        refuse_unread_columns(example, name)
        way = "correct it, or remove it: dataset.filter(...)"
        try:
            texts, images = self._read(example)
            is_alone = len(images) == 1 or not self._needs_images
            counts = [self._count(*_size_of(image), is_alone) for image in images]
        except Exception as error:
            raise ValueError(f"{name} cannot be read ({type(error).__name__}: {error!s:.120}); {way}") from error
        for kind, (mark, _) in self._media.items():
            if any(mark in text for text in texts):
                raise ValueError(f"{name} has {kind} ({mark}), which TRL's collator does not read; remove it")
        marks = sum(text.count(self._mark) for text in texts)
        if marks not in (0, len(images)):  # PaliGemma needs none
            raise ValueError(f"{name} has {marks} placeholders ({self._mark}) for {len(images)} images; {way}")
        replaced = self._text_tokens([self._mark] * marks)
        return self._text_tokens(texts) - replaced + sum(counts), sum(counts)

    def of_table(
        self, table: Any, indices: Sequence[int], features: Any, name: str, version: str
    ) -> dict[str, list[int]]:
        """Return the lengths of an Arrow table's examples; only the cache of `Dataset.map` reads `version`."""
        examples = map(features.decode_example, table.to_pylist())
        names = (f"example {index} of {name}" for index in indices)
        lengths = list(map(self, examples, names))
        return {"length": [length for length, _ in lengths], "image_tokens": [images for _, images in lengths]}

    def _read(self, example: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Any]]:
        """Return the texts that TRL's collator tokenizes, with placeholders, and the images for them."""
        images = images_of(example)
        if example.get("messages") is not None:
            turns = prepare_multimodal_messages(example["messages"], images=images)
            contents = [turn.get("content") or () for turn in turns]
            parts = [part for content in contents for part in content if part["type"] == "image"]
            found = [part[key] for part in parts for key in ("image", "url", "path", "base64") if key in part]
            template = getattr(self._collator, "chat_template", None)  # of TRL since 1.15
            return [self._processor.apply_chat_template(turns, chat_template=template, tokenize=False)], found
        text = example.get(self._collator.dataset_text_field)
        if text is not None:
            return [text], images
        pair = {"prompt": example["prompt"], "completion": example["completion"]}
        if is_conversational(pair):
            pair["prompt"] = prepare_multimodal_messages(pair["prompt"], images=images)
            pair["completion"] = prepare_multimodal_messages(pair["completion"])
            pair = apply_chat_template(pair, self._processor)
        return [pair["prompt"], pair["completion"]], images

    def _text_tokens(self, texts: Sequence[str]) -> int:
        return sum(map(len, self._processor.tokenizer(texts, add_special_tokens=False)["input_ids"])) if texts else 0

    def _count(self, height: int, width: int, is_alone: bool) -> int:
        """Return the number of tokens that replace the placeholder of an image, alone or beside another."""
        size, key = (height, width), (height, width, is_alone)
        if key not in self._counts:
            known = is_alone and self._around is not None
            self._counts[key] = self._estimated(size) + self._around if known else self._processed(size, 2 - is_alone)
        return self._counts[key]

    def _estimated(self, size: tuple[int, int]) -> int:
        return self._processor._get_num_multimodal_tokens(image_sizes=[size], **self._pixels)["num_image_tokens"][0]

    def _processed(self, size: tuple[int, int], images: int = 1) -> int:
        from PIL import Image

        blanks = [Image.new("RGB", size[::-1], "white")] * images
        text = self._mark * images
        batch = self._processor(images=[blanks], text=[text], return_tensors="pt", add_special_tokens=False)
        return batch["input_ids"].shape[1] // images


def refuse_unread_columns(example: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError if an example, which errors call `name`, has a column that TRL ignores beside images."""
    for column in _UNREAD:
        if example.get(column):
            problem = f"{name} has a column {column}, which TRL does not read with images"
            raise ValueError(f"{problem}; write it into a column messages, and remove it")


def _size_of(image: Any) -> tuple[int, int]:
    """Return the height and width that an image, of any form that TRL takes, will have once decoded."""
    from PIL import ExifTags, Image
    from transformers.image_utils import get_image_size, load_image

    file = image
    if isinstance(image, Mapping):
        file = image["path"] if image["bytes"] is None else BytesIO(image["bytes"])
    if isinstance(file, str) and not os.path.isfile(file):  # in an archive or base64, or remote
        image = ImageFeature().decode_example(image) if isinstance(image, Mapping) else load_image(file)
    if isinstance(image, Image.Image):
        return image.height, image.width  # processors ignore its orientation
    if hasattr(image, "shape"):  # of a stream
        return get_image_size(image)
    with Image.open(file) as opened:  # reads the header only
        size = opened.height, opened.width
        if opened.format == "TIFF" and opened.width != opened.tag_v2[256]:
            return size  # newer versions of Pillow have turned it
        exif = Image.Image.getexif(opened)  # a PNG file's own method decodes it
        return size[::-1] if exif.get(ExifTags.Base.Orientation, 1) > 4 else size


def _state_of_files(dataset: Dataset) -> str:
    """Return a hash of the sizes and times of change of a dataset's files of images, for the cache of `Dataset.map`."""
    paths: set[str] = set()
    for column in set(IMAGES) & set(dataset.column_names):
        for values in dataset.data.column(column).chunks:
            while hasattr(values, "values"):
                values = values.values  # of lists, without a copy of bytes
            if pa.types.is_struct(values.type) and {x.name for x in values.type} >= {"bytes", "path"}:
                values = pc.struct_field(values.filter(pc.is_null(pc.struct_field(values, "bytes"))), "path")
            if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                short = values.filter(pc.less(pc.binary_length(values), 4096))  # others are images in base64
                paths |= {path.split("::")[-1] for path in short.to_pylist()}
    states = [os.stat(path) for path in sorted(paths) if os.path.isfile(path)]
    return Hasher.hash([(state.st_size, state.st_mtime_ns) for state in states])


def pack_examples(
    dataset: Any,
    collator: Any,
    max_length: int,
    *,
    max_image_tokens: int | None = None,
    num_proc: int | None = None,
    name: str = "train",
) -> Any:
    """Pack a dataset with images best-fit-decreasing into rows of raw examples. No image is decoded before it is read.

    Args:
        dataset: Dataset or IterableDataset of raw examples, as TRL's SFTTrainer takes them.
        collator: TRL's `DataCollatorForVisionLanguageModeling`.
        max_length: maximum number of tokens per row.
        max_image_tokens: maximum number of image tokens per row; None is `max_length`.
        num_proc: number of processes that compute lengths, for a Dataset.
        name: the dataset's name in errors.

    Returns:
        rows with `examples`, a list of raw examples, and, of a Dataset, their lengths in `seq_lengths`.

    Raises:
        TypeError: `max_image_tokens` is not an integer.
        ValueError: it is less than 1, the dataset has a transform, the processor has no `image_token`, or an example is
            unreadable, empty or longer than a row, or has video, audio or a column that TRL ignores beside images.
    """
    refuse_transform(dataset, f"the {name} dataset")
    limit = as_count("max_image_tokens", max_image_tokens) or max_length
    lengths_of = ExampleLengths(collator)
    limits = {"max_length": max_length, "max_image_tokens": limit, "name": f"the {name} dataset"}
    if isinstance(dataset, IterableDataset):
        features = dataset.features
        stream = dataset.decode(False).cast(decoding(features, media=False)) if features else dataset
        packed = (
            stream.map(whole)
            .select_columns([EXAMPLE])
            .map(
                functools.partial(_pack_stream, lengths_of, **limits),
                batched=True,
                with_indices=True,
                batch_size=_STREAMED_WINDOW,
                remove_columns=[EXAMPLE],
            )
        )
        return packed.map(_decoded, fn_kwargs={"features": decoding(features, json=False)}) if features else packed
    with global_then_local_main_first():  # others read the cache
        measured = dataset.with_format("arrow").map(
            lengths_of.of_table,
            batched=True,
            with_indices=True,
            batch_size=100,
            fn_kwargs={
                "features": decoding(dataset.features, media=False),
                "name": limits["name"],
                "version": f"2, transformers {transformers.__version__}, files {_state_of_files(dataset)}",
            },
            remove_columns=dataset.column_names,
            num_proc=num_proc,
            desc=f"Measuring {name} dataset",
        )
    lengths, images = (measured.with_format("numpy")[column][:] for column in ("length", "image_tokens"))
    rows: list[list[int]] = []
    for start in range(0, len(lengths), _WINDOW):
        window = range(start, min(start + _WINDOW, len(lengths)))
        rows += _pack(lengths[window], images[window], window, **limits)
    table = Dataset.from_dict({EXAMPLES: rows, "seq_lengths": [lengths[row] for row in rows]})
    return table.with_transform(functools.partial(_read_examples, dataset))


def _read_examples(dataset: Dataset, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of rows of indices with the raw examples of a dataset."""
    if EXAMPLES not in batch:
        return batch
    return batch | {EXAMPLES: [[dataset[index] for index in row] for row in batch[EXAMPLES]]}


def _decoded(row: dict[str, Any], features: Any) -> dict[str, Any]:
    return {EXAMPLES: [features.decode_example(example) for example in row[EXAMPLES]]}


@dataclass
class RowCollator:
    """Collates rows of `pack_examples` by a `DataCollatorForPackedVisionLanguageModeling`."""

    collator: Any
    max_length: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate one batch; raise a ValueError if it has more tokens than its rows may have."""
        batch = self.collator(rows)
        unit = self.collator.pad_to_multiple_of or 1
        tokens, limit = batch["input_ids"].numel(), -(-len(rows) * self.max_length // unit) * unit
        if tokens > limit:
            raise ValueError(
                f"a batch of {len(rows)} rows of up to {self.max_length} tokens has {tokens}: the processor makes more "
                "tokens than it announces. Set dataset_kwargs={'skip_prepare_dataset': True}, and a row is one batch"
            )
        return batch


def _pack_stream(
    lengths_of: ExampleLengths, batch: dict[str, list[Any]], indices: Sequence[int], *, name: str, **limits: Any
) -> dict[str, list[Any]]:
    """Pack a window of a stream."""
    examples = batch[EXAMPLE]
    names = (f"example {index} of {name}" for index in indices)
    lengths, images = zip(*map(lengths_of, examples, names), strict=True)
    rows = _pack(lengths, images, indices, name=name, **limits)
    return {EXAMPLES: [[examples[index - indices[0]] for index in row] for row in rows]}


def _pack(
    lengths: Sequence[int],
    images: Sequence[int],
    indices: Sequence[int],
    *,
    max_length: int,
    max_image_tokens: int,
    name: str,
) -> list[list[int]]:
    """Return the indices of the examples of each row, given each example's tokens and image tokens."""
    for index, length, tokens in zip(indices, lengths, images, strict=True):
        problem = f"example {index} of {name} has {length} tokens, {tokens} of them for images"
        way = "shrink its images, or remove it: dataset.filter(...)"
        if not length:
            raise ValueError(f"example {index} of {name} is empty; remove it: dataset.filter(...)")
        if length > max_length:
            raise ValueError(f"{problem}, but max_length is {max_length}; raise it, {way}")
        if tokens > max_image_tokens:
            raise ValueError(f"{problem}, but max_image_tokens is {max_image_tokens}; raise it, {way}")
    rows = best_fit_decreasing(lengths, max_length, images, max_image_tokens)
    return [[indices[item] for item in row] for row in rows]
