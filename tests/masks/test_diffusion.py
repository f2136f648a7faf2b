"""Masks of block diffusion: mirrored rows of packed documents against the order of the paper.

`tests/collators/test_diffusion.py` trains models on them.
"""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tools.block_diffusion import mirrored, reference_mask
from torch import Tensor
from torch.nn.functional import pad

from flashmask_hf import masks


def reference_rows(index: Tensor, noisy: Tensor, lengths: list[int], copies: int) -> Tensor:
    """Return where each mirrored row is in the order of the paper, document after document: int64 [S]."""
    rows = noisy.nonzero()[:, 0][index[noisy].argsort(stable=True)]  # as the docstring of the order says
    copy = torch.full_like(index, copies)
    for c in range(copies):
        copy[rows[c::copies]] = c
    length = torch.tensor(lengths)
    start = (length.cumsum(0) - length).repeat_interleave(length)[index]
    return start * copies + copy * length.repeat_interleave(length)[index] + index


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    size=st.integers(1, 10),
    copies=st.integers(1, 3),
    spare=st.integers(0, 3),
)
@example(lengths=[1], size=1, copies=1, spare=3)  # padding would have a block without tokens
def test_mirrored_rows_see_what_the_paper_says(lengths: list[int], size: int, copies: int, spare: int) -> None:
    index, noisy = masks.block_diffusion_order(lengths, size, copies)
    starts = [sum(lengths[:d]) for d in range(len(lengths))]
    rows = mirrored(lengths, size, copies)
    assert index.tolist() == [starts[document] + token for document, _, _, token in rows]
    assert noisy.tolist() == [copy >= 0 for _, copy, _, _ in rows]
    at = reference_rows(index, noisy, lengths, copies)
    assert at.sort().values.equal(torch.arange(len(rows)))
    visible = torch.block_diag(*[reference_mask(length, size, copies).int() for length in lengths]).bool()
    mask = masks.block_diffusion(lengths, size, copies, kv_len=len(rows) + spare)
    assert torch.equal(mask.to_dense()[0, 0], pad(visible[at][:, at], (0, spare, 0, spare)))
    clean = [reference_mask(length, size)[length:, length:].int() for length in lengths]
    assert torch.equal(masks.block_causal(lengths, size).to_dense()[0, 0], torch.block_diag(*clean).bool())


def test_the_order_lives_where_it_is_asked_to() -> None:
    for x in masks.block_diffusion_order(torch.tensor([3, 2]), 2, device="meta"):
        assert x.device.type == "meta"
        assert x.shape == (10,)
