"""Random conversations with images, in a packed row and in padded batches as of TRL's collator.

Turns have 32 to 4,096 tokens (log-normal, median 256), images 64 to 1,024 (of Gemma: 256).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flashmask_hf.collators import DataCollatorForPackedVisionLanguageModeling, RopeIndex

SHORTEST, MEDIAN, LONGEST = 32, 256, 4096  # tokens of text in a conversation
SIDES = (8, 32)  # least and largest height and width of an image in tokens, where it is free
BATCH_SIZE = 8  # of TRL's trainers by default

Conversation = tuple[int, list[tuple[int, int]]]
"""Tokens of text, and the height and width of each image in tokens."""


def draw(length: int, share: float, sides: tuple[int, int], generator: torch.Generator) -> list[Conversation]:
    """Draw conversations of `length` tokens in all, a `share` of them in images."""
    made: list[Conversation] = []
    owed = 0.0  # tokens of images
    while length:
        text = torch.empty(()).log_normal_(math.log(MEDIAN), 1.0, generator=generator)
        text = min(length, int(text.clamp(SHORTEST, LONGEST)))
        length -= text
        if length < SHORTEST:  # the last one takes the rest
            text, length = text + length, 0
        owed += text * share / (1 - share)
        images: list[tuple[int, int]] = []
        while len(images) + 1 < text:
            height, width = torch.randint(sides[0], sides[1] + 1, (2,), generator=generator).tolist()
            if height * width > min(2 * owed, length - SHORTEST):
                break
            images.append((height, width))
            owed -= height * width
            length -= height * width
        made.append((text, images))
    return made


class Conversations:
    """Conversations for Qwen2.5-VL, or for Gemma 3, whose images have one size.

    Attributes:
        has_axes: whether tokens have positions along axes.
        pixels: random patches or images; each batch reads a slice.
    """

    def __init__(self, model: Any):
        config = model.config
        tower = config.vision_config
        self.device, self.image = model.device, config.image_token_id
        self.has_axes = hasattr(tower, "spatial_merge_size")
        side = math.isqrt(getattr(config, "mm_tokens_per_image", 0))
        self.sides = SIDES if self.has_axes else (side, side)
        shape = (6 * tower.patch_size**2,) if self.has_axes else (3, tower.image_size, tower.image_size)
        self.pixels = torch.empty(0, *shape, device=model.device, dtype=model.dtype)
        tokens = SimpleNamespace(pad_token_id=0, image_token_id=self.image, video_token_id=self.image - 1)
        self._collate = DataCollatorForPackedVisionLanguageModeling(
            SimpleNamespace(tokenizer=tokens),
            rope_index=RopeIndex.of(model) if self.has_axes else None,
            collator=lambda examples: examples[0]["inputs"],
        )

    def draw(self, length: int, share: float, generator: torch.Generator) -> dict[str, Any]:
        """Draw a row of `length` tokens.

        Returns:
            dict: "packed", "batches" and "single", lists of batches with their slices of `pixels`; and the numbers of
            "labels" and "images".
        """
        drawn = draw(length, share, self.sides, generator)
        documents = [self.document(*one, generator) for one in drawn]
        starts = [*accumulate((len(document.get("pixel_values", ())) for document in documents), initial=0)]
        if starts[-1] > len(self.pixels):
            self.pixels = torch.randn(starts[-1], *self.pixels.shape[1:], device=self.device, dtype=self.pixels.dtype)

        def batches(size: int) -> list[Any]:
            edges = pairwise([*range(0, len(documents), size), len(documents)])
            return [(self._padded(documents[a:b]), slice(starts[a], starts[b])) for a, b in edges]

        packed = self._collate([{"examples": [{"inputs": document} for document in documents]}])
        return {
            "packed": [(self._moved(packed), slice(0, starts[-1]))],
            "batches": batches(BATCH_SIZE),
            "single": batches(1),
            "labels": sum(int((document["labels"][:, 1:] >= 0).sum()) for document in documents),
            "images": sum(len(images) for _, images in drawn),
        }

    def document(self, text: int, images: list[tuple[int, int]], generator: torch.Generator) -> dict[str, Tensor]:
        """Return what a processor makes of a conversation, pixels without memory."""
        pieces = torch.randint(0, self.image - 1, (text,), generator=generator).tensor_split(len(images) + 1)
        spans = [torch.full((height * width,), self.image) for height, width in images]
        parts = [part for pair in zip(pieces[1:], spans, strict=True) for part in pair[::-1]]
        ids = torch.cat([pieces[0], *parts])[None]
        types = (ids == self.image).long()
        document = {"input_ids": ids, "labels": ids.masked_fill(types > 0, -100)}
        document["mm_token_type_ids" if self.has_axes else "token_type_ids"] = types
        if images:
            count = 4 * int(types.sum()) if self.has_axes else len(images)
            document["pixel_values"] = torch.empty(count, *self.pixels.shape[1:], device="meta")
            if self.has_axes:
                document["image_grid_thw"] = torch.tensor([(1, 2 * height, 2 * width) for height, width in images])
        return document

    def _padded(self, documents: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch of documents padded to the longest."""
        batch = {}
        for key in documents[0].keys() - {"pixel_values", "image_grid_thw"}:
            batch[key] = pad_sequence([one[key][0] for one in documents], True, -100 if key == "labels" else 0)
        lengths = torch.tensor([one["input_ids"].shape[1] for one in documents])
        batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        grids = [one["image_grid_thw"] for one in documents if "image_grid_thw" in one]
        return self._moved(batch | ({"image_grid_thw": torch.cat(grids)} if grids else {}))

    def _moved(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.to(self.device) for key, value in batch.items() if key != "pixel_values"}
