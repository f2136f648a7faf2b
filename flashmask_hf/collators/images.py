"""Images in packed trees: what a model reads of their tokens beside ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashmask_hf.collators.rope_index import RopeIndex
from flashmask_hf.names import PACKED_IDS, PACKED_INDEX, PACKED_POSITIONS

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Keys of the types of tokens, 0 for text. Gemma finds there the images whose tokens see each other."""


def add_image_tokens(
    packed: dict[str, Tensor],
    ids: Tensor,
    real: Tensor,
    types: Mapping[str, Tensor],
    sizes: Sequence[Mapping[str, Tensor]],
    rope_index: RopeIndex | None,
) -> None:
    """Add token types, int64 [R, S], and positions along axes to packed rows.

    With images and a `rope_index`, positions become int64 [4, R, S]: depths, then the axes, of each path as of its
    sequence alone.

    Args:
        packed: keys of `PackedRows.indexed_batch`, changed in place.
        ids: token ids of the sequences, int64 [N, L].
        real: bool [N, L], False for padding.
        types: token types of the sequences, int64 [N, L], by key of `TOKEN_TYPES`.
        sizes: sizes of the images of each sequence, such as `image_grid_thw` [images, 3]; empty without images.
        rope_index: of a model with axes of positions.
    """
    shape = packed[PACKED_IDS].shape

    def lay_out(values: Tensor) -> Tensor:
        spread = values.new_zeros(*values.shape[:-2], shape.numel())
        spread[..., packed[PACKED_INDEX][real]] = values[..., real]
        return spread.unflatten(-1, shape)

    packed |= {name: lay_out(values) for name, values in types.items()}
    if rope_index is None or not any(sizes):
        return
    axes, tokens = ids.new_zeros(3, *ids.shape), {"input_ids": ids, **types}
    for row, (here, own) in enumerate(zip(real, sizes, strict=True)):
        sequence = {name: x[row, here][None] for name, x in tokens.items()}
        axes[:, row, here] = rope_index(sequence | dict(own))[-3:, 0]
    packed[PACKED_POSITIONS] = torch.cat([packed[PACKED_POSITIONS][None], lay_out(axes)])
