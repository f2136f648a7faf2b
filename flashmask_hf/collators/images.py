"""Images of examples, and what a model reads of their tokens beside ids in packed trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.collators.rope_index import RopeIndex
from flashmask_hf.names import PACKED_IDS, PACKED_INDEX, PACKED_POSITIONS

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Keys of the types of tokens, 0 for text."""


def images_of(example: Mapping[str, Any]) -> list[Any]:
    """Return the images of a raw example, its `image` or its `images`; none without both."""
    image = example.get("image")
    return list(example.get("images") or []) if image is None else [image]


def media_tokens(processor: Any) -> dict[str, tuple[str, int]]:
    """Return the token, as text and as id, of a video, and of audio, in a processor's prompts.

    Some processors name a token that their tokenizer lacks, which is text.
    """
    marks = {kind: getattr(processor, f"{kind}_token", None) for kind in ("video", "audio")}
    others = (None, getattr(processor, "image_token", None))
    tokenizer = processor.tokenizer
    tokens = {kind: (mark, tokenizer.convert_tokens_to_ids(mark)) for kind, mark in marks.items() if mark not in others}
    return {kind: found for kind, found in tokens.items() if found[1] not in (None, tokenizer.unk_token_id)}


def add_image_tokens(
    packed: dict[str, Tensor],
    ids: Tensor,
    real: Tensor,
    types: Mapping[str, Tensor],
    sizes: Sequence[Mapping[str, Tensor]],
    trees: Sequence[int],
    rope_index: RopeIndex | None,
) -> None:
    """Add token types, int64 [R, S], and positions along axes to packed rows.

    With images and a `rope_index`, positions become int64 [4, R, S]: depths, then the axes, as of each sequence alone.
    Answers are text, so the longest path of a tree has all positions.

    Args:
        packed: keys of `PackedRows.indexed_batch`, changed in place.
        ids: int64 [N, L].
        real: bool [N, L], False for padding.
        types: token types, int64 [N, L] each.
        sizes: sizes of each sequence's images, such as `image_grid_thw` [images, 3].
        trees: number of each sequence's tree.
        rope_index: for models with axes of positions.
    """
    shape = packed[PACKED_IDS].shape

    def lay_out(values: Tensor) -> Tensor:
        spread = values.new_zeros(*values.shape[:-2], shape.numel())
        spread[..., packed[PACKED_INDEX][real]] = values[..., real]
        return spread.unflatten(-1, shape)

    packed |= {name: lay_out(values) for name, values in types.items()}
    if rope_index is None or not any(sizes):
        return
    lengths, tokens = real.sum(1).tolist(), {"input_ids": ids, **types}
    axes, longest = ids.new_zeros(3, *ids.shape), {}
    for row in sorted(range(len(ids)), key=lengths.__getitem__):
        longest[trees[row]] = row
    for tree, row in longest.items():
        sequence = {name: x[row, real[row]][None] for name, x in tokens.items()}
        positions = rope_index(sequence | dict(sizes[row]))[-3:, 0]
        for other in (other for other, own in enumerate(trees) if own == tree):
            axes[:, other, real[other]] = positions[:, : lengths[other]]
    packed[PACKED_POSITIONS] = torch.cat([packed[PACKED_POSITIONS][None], lay_out(axes)])
