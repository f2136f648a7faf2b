"""Block diffusion as its paper writes it (BD3LM, https://arxiv.org/abs/2503.09573): rows, and which see each other."""

from __future__ import annotations

import torch
from torch import Tensor

Row = tuple[int, int, int, int]
"""Document, noisy copy (-1 if clean), block and token of a row, the last two counted in the document."""


def mirrored(lengths: list[int], size: int, copies: int = 1) -> list[Row]:
    """Return the rows of packed documents in mirrored order."""
    rows: list[Row] = []
    for document, length in enumerate(lengths):
        blocks = [range(start, min(start + size, length)) for start in range(0, length, size)]
        rows += [(document, copy, b, t) for b, block in enumerate(blocks) for copy in range(copies) for t in block]
        rows += [(document, -1, b, t) for b, block in reversed([*enumerate(blocks)]) for t in block]
    return rows


def sees_in_block_diffusion(rows: list[Row], i: int, j: int) -> bool:
    """Return whether row i sees row j; padding behind the rows sees nothing."""
    if max(i, j) >= len(rows) or rows[i][0] != rows[j][0]:
        return False
    (_, copy, block, _), (_, key_copy, key_block, _) = rows[i], rows[j]
    if copy == key_copy and block == key_block:
        return True  # block diagonal
    return key_copy == -1 and key_block < block  # offset block causal, and block causal


def reference_mask(length: int, size: int, copies: int = 1) -> Tensor:
    """Return the mask of one document: its noisy copies, one after the other, then its clean tokens. Bool [S, S]."""
    block = torch.arange(length) // size
    own, before = block[:, None] == block, block[:, None] > block
    noisy = torch.cat([torch.block_diag(*[own.int()] * copies).bool(), before.repeat(copies, 1)], 1)
    clean = torch.cat([torch.zeros(length, copies * length, dtype=torch.bool), own | before], 1)
    return torch.cat([noisy, clean])
