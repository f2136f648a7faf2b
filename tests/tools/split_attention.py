"""Program of `tests/recipes/test_several_gpus.py`: attention of a layer on a row that is split over processes.

It runs in bfloat16 on GPUs, one per process, else in float32 on the CPU:
PYTHONPATH=tests:. python -m torch.distributed.run --standalone --nproc-per-node 2 tests/tools/split_attention.py FILE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from tools.support import Lane, attention_inputs
from tools.tiny import llama_config
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention

from flashmask_hf import flashmask_attention, masks
from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.parallel import contiguous_rows, deal_rows, sequence_parallel

LENGTHS = [113, 63, 1023, 401, 1, 191]
"""Tokens of the documents; shards are seven blocks of 128 rows."""


def results_of(attend: Callable[..., Tensor], tensors: Sequence[Tensor], dout: Tensor) -> dict[str, Tensor]:
    """Return output and gradients, [B, S, H, D] each."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    found = out.detach(), *torch.autograd.grad(out, leaves, dout)
    return {name: x.transpose(1, 2) for name, x in zip(("out", "dq", "dk", "dv"), found, strict=True)}


def main(file: str) -> None:
    """Write the results of whole rows, of both exchanges, and of eager code in the same dtype and in float64."""
    on_gpu, rank = torch.cuda.is_available(), int(os.environ["RANK"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    lane = Lane("hopper", f"cuda:{rank}", torch.bfloat16) if on_gpu else Lane("torch", "cpu", torch.float32)
    device = lane.device
    if on_gpu:
        torch.cuda.set_device(device)
    q, k, v = attention_inputs(lane, 1, 8, 4, sum(LENGTHS), sum(LENGTHS), 128)
    dout = attention_inputs(lane, 1, 8, 4, sum(LENGTHS), sum(LENGTHS), 128, seed=1)[0].detach()
    mask = masks.causal_document(LENGTHS, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])[None]
    layer = LlamaAttention(llama_config(num_attention_heads=8, num_key_value_heads=4, head_dim=128), 0)

    def attend(position_ids: Tensor) -> Callable[..., Tensor]:
        options = {"startend_row_indices": mask.indices, "position_ids": position_ids}
        return lambda q, k, v: attention_forward(layer, q, k, v, None, **options)[0].transpose(1, 2)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashmask_attention(q, k, v, mask, impl="reference")

    found = {"eager": results_of(reference, (q, k, v), dout)}
    found["exact"] = results_of(reference, [x.double() for x in (q, k, v)], dout.double())
    torch.use_deterministic_algorithms(True)
    found["whole"] = results_of(attend(positions), (q, k, v), dout)
    size = dist.get_world_size()
    for exchange, rows in (("heads", contiguous_rows(q.shape[2], size, device)), ("keys", deal_rows(mask, size))):
        with sequence_parallel(dist.group.WORLD, rows, positions, exchange=exchange) as split:
            shard = [x.detach().transpose(1, 2)[:, split.own_rows].transpose(1, 2) for x in (q, k, v, dout)]
            own = results_of(attend(split.own_positions), shard[:3], shard[3])
        found[exchange] = {name: torch.empty_like(x) for name, x in found["whole"].items()}
        for name, x in own.items():
            every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(every, x.contiguous())
            found[exchange][name][:, rows.flatten()] = torch.cat(every, 1)
    if rank == 0:
        torch.save(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
