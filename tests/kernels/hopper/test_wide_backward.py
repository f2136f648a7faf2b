"""The Hopper backward of wide heads, 256 and 192 with values of 128: compiled, on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from tools.support import FAMILIES, HEADS, INTERPRETED, KV_HEADS, Lane, assert_within_budget, attention_inputs, poisoned

from flashmask_hf import FlashMask, flashmask_attention, masks, plan
from flashmask_hf.kernels.hopper import gluon

if gluon.import_failure is not None:
    pytest.skip(f"Gluon lanes: {gluon.import_failure}", allow_module_level=True)

from tools import hopper_kernels
from tools.gluon_interpreter import interpreted

from flashmask_hf.kernels.hopper import backward as hopper_backward


def inputs(dims, q_len, kv_len, batch=1, heads=2, kv_heads=1, device="cpu", dtype=torch.float16):
    lane = Lane("hopper", device, dtype)
    q, k, v = (x.detach() for x in attention_inputs(lane, batch, heads, kv_heads, q_len, kv_len, *dims))
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(batch, q_len, heads, dims[1], generator=generator).to(device, dtype).transpose(1, 2)
    return q, k, v, dout


def reference(q, k, v, dout, mask, dtype, softcap):
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out, lse = flashmask_attention(q, k, v, mask, softcap=softcap or None, impl="reference", return_lse=True)
    return out.detach(), lse.detach(), torch.autograd.grad(out, (q, k, v), dout.to(dtype))


def check(given, mask, deterministic=False, softcap=0.0, shown=None):
    q, k, v, dout = given
    out, _, eager = reference(*given, mask, q.dtype, softcap)
    _, lse, exact = reference(*given, mask, torch.float64, softcap)
    tiles = plan.build_plan(mask.indices, mask.causal, q.shape[2])
    with poisoned():
        *actual, _delta = hopper_kernels.backward(
            dout,
            *(shown or (q, k, v)),
            lse.float(),
            (out, None),
            mask,
            tiles,
            q.shape[3] ** -0.5,
            softcap,
            deterministic,
        )
    for name, x, near, want in zip(("dq", "dk", "dv"), actual, eager, exact, strict=True):
        assert_within_budget(x, near, want, name)
    return actual


@pytest.mark.interpreter
@pytest.mark.parametrize("dims", [(256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_x(monkeypatch, dims, family):
    monkeypatch.setattr(hopper_backward, "multiprocessors", lambda device: 3)
    mask = FAMILIES[family](333, 200)
    batch, heads = mask.indices.shape[:2]
    batch, heads, kv_heads = (batch, 2, 1) if heads == 1 else (2, HEADS, KV_HEADS)
    with interpreted(len(family)):
        check(inputs(dims, 200, 333, batch, heads, kv_heads), mask, bool(len(family) % 2))
