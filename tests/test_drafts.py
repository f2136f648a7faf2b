"""EAGLE-3's steps and a layer of DFlash against attention over all keys under the rules of SpecForge."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tools.support import assert_within_budget
from tools.tiny import assert_exact
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from flashmask_hf import FlashMask, keep_attention, masks
from flashmask_hf.drafts import eagle3_attention
from flashmask_hf.hf.attention import attention_forward


def steps_of(count: int, rows: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return `count` tensors [2, 2, rows, width] that require gradients."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(2, 2, rows, width, generator=generator).to(dtype).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("later", [0, 1, 6])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_step_sees_documents_of_step_0_and_itself_in_later_steps(later: int, compiled: bool) -> None:
    """The last tokens are padding, which sees itself alone; in step 0, nothing."""
    mask, rows = masks.causal_document([9, 4, 3], kv_len=18), 18
    q = torch.randn(2, 4, rows, 8, generator=torch.Generator().manual_seed(9)).double().requires_grad_()
    keys, values = steps_of(later + 1, rows, 8), steps_of(later + 1, rows, 6)
    visible = torch.cat([mask.to_dense()[0, 0], *[torch.eye(rows, dtype=torch.bool)] * later], 1)
    want = scaled_dot_product_attention(
        q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=visible, scale=0.3, enable_gqa=True
    ).nan_to_num()
    attend = torch.compile(eagle3_attention, backend="aot_eager", fullgraph=True) if compiled else eagle3_attention
    got = attend(q, keys, values, mask, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.arange(got.numel(), dtype=torch.float64).view_as(got).sin()
    upstream[:, :, 16:] *= later > 0
    inputs = [q, *keys, *values]
    for ours, theirs in zip(*(torch.autograd.grad((x * upstream).sum(), inputs) for x in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_products_of_later_steps_are_summed_in_float32() -> None:
    """A product of 256 ones exceeds what bfloat16 counts, 256, if it is summed there."""
    q = torch.ones(1, 1, 1, 384, dtype=torch.bfloat16)
    values = [torch.full((1, 1, 1, 1), x, dtype=torch.bfloat16) for x in (0.0, 1.0)]
    later = q.clone()
    later[..., 0] += 1 / 64  # rounds away in a sum of 384 in bfloat16
    got = eagle3_attention(q, [q, later], values, masks.causal(1), scale=64.0)
    assert got.item() == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=2**-8)
    assert got.dtype == torch.bfloat16


class DraftLayer(nn.Module):
    """Attention of DFlash: queries of draft tokens, keys and values of the target's tokens, then of draft tokens."""

    is_causal = False

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = (nn.Linear(16, heads * 8, dtype=torch.float64) for heads in (4, 2))

    def forward(self, drafts: Tensor, target: Tensor, mask: FlashMask | Tensor) -> Tensor:
        q, k = self.queries(drafts), self.keys(torch.cat([target, drafts], 1))
        q, k = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in (q, k))
        if isinstance(mask, FlashMask):
            return attention_forward(self, q, k, k, mask, sliding_window=None)[0]
        return scaled_dot_product_attention(q, k, k, mask, enable_gqa=True).transpose(1, 2)


WAYS: dict[str, Callable[..., Any]] = {
    "plain": lambda layer: layer,
    "checkpointed": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "kept": lambda layer: partial(checkpoint, layer, use_reentrant=False, context_fn=keep_attention),
    "compiled": partial(torch.compile, backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("way", ["plain", "checkpointed", "kept", pytest.param("compiled", marks=pytest.mark.full)])
def test_a_layer_of_draft_blocks(way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = masks.draft_blocks([[9, 7], [12, 4]], [[2, 5, 10, 13], [0, 4, 11, 14]], 4)
    inputs = [torch.randn(2, 16, 16, generator=generator).double().requires_grad_() for _ in range(2)]
    layer = DraftLayer()

    def run(run_layer: Callable[..., Tensor], mask: FlashMask | Tensor) -> list[Tensor]:
        out = run_layer(*inputs, mask)
        upstream = torch.arange(out.numel(), dtype=torch.float64).view_as(out).sin()
        return [out, *torch.autograd.grad((out * upstream).sum(), [*inputs, *layer.parameters()])]

    assert_exact(run(WAYS[way](layer), mask), run(layer, mask.to_dense()))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_on_a_gpu(compiled: bool) -> None:
    """A step in bfloat16 is as near to float64 as eager code on a dense mask, twice its error allowed."""
    mask, rows = masks.causal_document([301, 150, 60], kv_len=517, device="cuda"), 517
    q = torch.randn(2, 4, rows, 64, generator=torch.Generator().manual_seed(9)).to("cuda", torch.bfloat16)
    pairs = [x.detach().to("cuda") for x in steps_of(6, rows, 64, torch.bfloat16)]
    visible = torch.cat([mask.to_dense()[0, 0], *[torch.eye(rows, dtype=torch.bool, device="cuda")] * 2], 1)
    attend = torch.compile(eagle3_attention, fullgraph=True) if compiled else eagle3_attention

    def dense(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: object) -> Tensor:
        k, v = (torch.cat(x, 2).repeat_interleave(2, 1) for x in (keys, values))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
        return scores.softmax(-1) @ v

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, *pairs)]
        out = function(inputs[0], inputs[1:4], inputs[4:], mask)
        upstream = torch.arange(out.numel(), device="cuda").view_as(out).sin().to(dtype)
        return [out.detach(), *torch.autograd.grad((out * upstream).sum(), inputs)]

    results = run(attend, torch.bfloat16), run(dense, torch.bfloat16), run(dense, torch.float64)
    for i, (got, eager, exact) in enumerate(zip(*results, strict=True)):
        assert_within_budget(got, eager, exact, f"tensor {i}")


def test_wrong_steps_raise() -> None:
    q, mask = torch.ones(1, 2, 3, 8), masks.causal(3)
    with pytest.raises(ValueError, match=r"^keys has 0 steps; give as many values as keys, and at least step 0$"):
        eagle3_attention(q, [], [], mask)
    with pytest.raises(ValueError, match=r"^values has 1 steps; give as many values as keys"):
        eagle3_attention(q, [q, q], [q], mask)
    with pytest.raises(ValueError, match=r"^keys\[1\] has shape \[1, 2, 2, 8\], but keys\[0\] \[1, 2, 3, 8\]$"):
        eagle3_attention(q, [q, q[:, :, 1:]], [q, q], mask)
    with pytest.raises(ValueError, match=r"^q has 2 rows, but keys have 3; each row has a key in later steps$"):
        eagle3_attention(q[:, :, 1:], [q, q], [q, q], mask)
