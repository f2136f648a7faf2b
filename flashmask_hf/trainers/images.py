"""Images of prompts in TRL's alignment trainers: which are equal, and one copy of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from flashmask_hf.collators.images import TOKEN_TYPES, images_of
from flashmask_hf.trainers.formats import preference_columns
from flashmask_hf.trainers.towers import run_tower_in_every_call

_COUNTS = ("num_images", "num_tiles")
_PIXELS = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "image_position_ids",
)  # fmt: skip
IMAGE_KEYS = (*_PIXELS, *TOKEN_TYPES, *_COUNTS)
"""Keys of TRL's batches for images: of pixels, of tokens, and numbers of images and tiles of each sequence."""


def prepare_models(trainer: Any) -> None:
    """Make policy and reference of several processes run their towers in every call; a ValueError for PaliGemma."""
    if trainer.model.config.model_type == "paligemma":
        raise ValueError("PaliGemma's prompts are bidirectional, so answers cannot share one; use TRL's trainer")
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None and trainer.accelerator.num_processes > 1:
            run_tower_in_every_call(trainer.accelerator.unwrap_model(model), trainer.processing_class)


def count_padded_rows(batch: dict[str, Any], rows: int) -> None:
    """Count one image per sequence where pixels are padded to a row per sequence, as of Idefics and SmolVLM.

    TRL splits such rows by their numbers of images if these happen to sum to the number of rows.
    """
    if _are_padded(batch):
        batch["num_images"] = [1] * rows


def _are_padded(pixels: Mapping[str, Any]) -> bool:
    return pixels.get("pixel_attention_mask") is not None and pixels.get("spatial_shapes") is None


class SequenceImages:
    """Images of N sequences of a prompt and a completion, split by sequence.

    Args:
        inputs: tensors of `IMAGE_KEYS` of TRL's batch, without counts.
        counts: numbers of images, and of tiles, of each sequence.
    """

    def __init__(self, inputs: dict[str, Tensor], counts: dict[str, list[int]]):
        self.types = {name: inputs[name].cpu() for name in TOKEN_TYPES if name in inputs}
        pixels = {name: inputs[name] for name in _PIXELS if name in inputs}
        split = split_pixel_values_by_grid({**pixels, **counts})
        self._parts = {name: list(x) if isinstance(x := split[name], list) else list(x.split(1)) for name in pixels}
        self._counts = counts.get("num_images", [])
        if _are_padded(pixels):  # False throughout for a sequence without images
            self._counts = pixels["pixel_attention_mask"].flatten(1).any(1).tolist()

    @classmethod
    def take(cls, kwargs: dict[str, Any], counts: dict[str, Iterator[int]], rows: int) -> SequenceImages:
        """Take the images of the next `rows` sequences out of the keywords of a model call and of the counts."""
        inputs = {name: x for name in IMAGE_KEYS if (x := kwargs.pop(name, None)) is not None}
        return cls(inputs, {name: list(itertools.islice(own, rows)) for name, own in counts.items()})

    @staticmethod
    def counts_of(kwargs: dict[str, Any]) -> dict[str, Iterator[int]]:
        """Return the numbers of images and tiles of each sequence among TRL's keywords, to be taken in order."""
        return {name: iter(kwargs[name]) for name in _COUNTS if kwargs.get(name) is not None}

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def sizes(self) -> list[dict[str, Tensor]]:
        """Sizes of the images of each sequence, on the CPU; none for a sequence without images."""
        pixels = ("pixel_values", "pixel_attention_mask")
        parts = {name: [x.cpu() for x in own] for name, own in self._parts.items() if name not in pixels}
        return [
            {name: own[row] for name, own in parts.items()} if count else {} for row, count in enumerate(self._counts)
        ]

    def kinds(self, prompts: Sequence[bytes], keep: int) -> list[int]:
        """Return for each of N sequences the first with an equal prompt and equal images.

        A sequence whose completion, its last `keep` columns, has images is equal to no other.
        """
        alone = [False] * len(prompts)
        if self.types:
            alone = torch.stack([types[:, -keep:].any(1) for types in self.types.values()]).any(0).tolist()
        found: dict[bytes, list[int]] = {}
        kinds: list[int] = []
        for row, prompt in enumerate(prompts):
            others = [] if alone[row] else found.setdefault(prompt, [])
            first = next((other for other in others if self._are_equal(row, other)), row)
            if first == row:
                others.append(row)
            kinds.append(first)
        return kinds

    def _are_equal(self, one: int, two: int) -> bool:
        pairs = [(parts[one], parts[two]) for parts in self._parts.values()]
        return all(x.shape == y.shape for x, y in pairs) and all(torch.equal(x, y) for x, y in pairs)

    def of(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the pixel keys of some sequences, one after another; none without images."""
        if not any(self._counts[row] for row in rows):
            return {}
        chosen = {name: [parts[row] for row in rows] for name, parts in self._parts.items()}
        return unsplit_pixel_values_by_grid(chosen)


class VisionPreferences:
    """Reader of preferences with images by TRL's collator, which does not truncate, and reads each prompt once."""

    def __init__(self, processor: Any):
        self._collate = DataCollatorForVisionPreference(_OncePerPrompt(processor))

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Return tokens, token types and sizes of images of raw examples, and keys of all their pixels.

        Examples are as `preference_columns` takes them, with, optionally, `images` or `image`. Each gets `prompt_ids`,
        `chosen_ids`, `rejected_ids` and its prompt's `TOKEN_TYPES`, int64 [n], and `sizes`, tensors [images, ...].
        """
        raw = [
            {name: x for name, x in example.items() if name != "image"}
            | preference_columns(example, index)
            | {"images": images_of(example)}
            for index, example in enumerate(examples)
        ]
        counts = [len(example["images"]) for example in raw]
        batch = self._collate(raw)
        ids, real, answered = (batch.pop(name) for name in ("input_ids", "attention_mask", "completion_mask"))
        prompts = {"prompt_ids": ids} | {name: batch.pop(name) for name in TOKEN_TYPES if name in batch}
        sizes = {name: x.split(counts) for name, x in batch.items() if x.dim() == 2 and len(x) == sum(counts)}
        asked, answered, half = (real - answered).bool(), answered.bool(), len(raw)
        tokenized = [
            {
                "chosen_ids": ids[row, answered[row]],
                "rejected_ids": ids[row + half, answered[row + half]],
                "sizes": {name: own[row] for name, own in sizes.items() if counts[row]},
                **{name: x[row, asked[row]] for name, x in prompts.items()},
            }
            for row in range(half)
        ]
        return tokenized, dict(batch)


class _OncePerPrompt:
    """Processor that reads the images of each prompt once, where TRL's collator repeats prompts for both answers."""

    def __init__(self, processor: Any):
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        if name == "_processor":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._processor, name)

    def __call__(self, images: Any = None, *, text: list[str], **kwargs: Any) -> Any:
        if images is None:
            return self._processor(text=text, **kwargs)
        half = len(text) // 2
        batch = self._processor(images=images[:half], text=text[:half], **kwargs)
        for name in ("input_ids", "attention_mask", *TOKEN_TYPES):
            if name in batch:
                batch[name] = torch.cat([batch[name]] * 2)
        return batch
