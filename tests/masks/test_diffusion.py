"""Masks of block diffusion: mirrored rows of packed documents against the order of the paper, also in a model."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tools.block_diffusion import mirrored, reference_mask
from tools.model_pairs import SIZES
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, Qwen3Config

from flashmask_hf import masks

BOUND = 1e-12
"""Largest error in float64, relative to the largest entry."""


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


def test_noisy_tokens_of_packed_documents_are_as_alone() -> None:
    """Two copies have noise of their own; SDPA runs each document by the dense mask, in the order of the paper."""
    lengths, size, copies = [7, 3, 10], 4, 2
    index, noisy = masks.block_diffusion_order(lengths, size, copies)
    at = reference_rows(index, noisy, lengths, copies)
    reference = torch.empty_like(index)
    reference[at] = torch.arange(len(at))  # the mirrored row of each row in the order of the paper
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 47, (sum(lengths),), generator=generator)[index]
    tokens = torch.where(noisy & (torch.rand(len(at), generator=generator) < 0.5), 47, tokens)
    position = torch.cat([torch.arange(length) for length in lengths])[index]
    upstream = torch.randn(len(at), 48, generator=generator, dtype=torch.float64) * noisy[:, None]

    model = tiny_model()
    mask = masks.block_diffusion(lengths, size, copies).bidirectional()
    model.set_attn_implementation("flashmask")
    packed = model(tokens[None], position_ids=position[None], startend_row_indices=mask.indices, use_cache=False)
    (packed.logits[0] * upstream).sum().backward()
    gradients = [x.grad for x in model.parameters()]

    model.zero_grad()
    model.set_attn_implementation("sdpa")
    for length, rows in zip(lengths, reference.split([(copies + 1) * length for length in lengths]), strict=True):
        visible = reference_mask(length, size, copies)[None, None]
        alone = model(tokens[rows][None], position_ids=position[rows][None], attention_mask=visible, use_cache=False)
        (alone.logits[0] * upstream[rows]).sum().backward()
        assert_close(packed.logits[0, rows], alone.logits[0])
    for x, gradient in zip(model.parameters(), gradients, strict=True):
        assert_close(gradient, x.grad)


def tiny_model():
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).double()


def assert_close(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max() <= BOUND * want.abs().max()
