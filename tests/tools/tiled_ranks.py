"""Case of `tests/long_rows/test_tiling.py`: a tiled Llama under DDP and FSDP2 has the gradients of a plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tools.tiny import assert_same_gradients, gradients_of, keep_float64
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from flashmask_hf.long_rows import tile_tokens
from flashmask_hf.long_rows.checkpointing import enable_checkpointing

STEPS = 2  # micro-batches of gradient accumulation


def accumulate(model: nn.Module, rank: int) -> None:
    for step in range(STEPS):
        ids = torch.randint(3, 48, (1, 20), generator=torch.Generator().manual_seed(10 * rank + step))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def check(model: nn.Module, want: dict[str, torch.Tensor]) -> None:
    grads = gradients_of(model)
    assert_same_gradients({key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in grads.items()}, want)


def train(group: Any) -> dict[str, Any]:
    keep_float64(pytest.MonkeyPatch())
    size, rank = group.size(), group.rank()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().train()
    tiled = copy.deepcopy(plain)
    tile_tokens(tiled, 6)
    for other in range(size):
        accumulate(plain, other)
    want = {name: parameter.grad / size for name, parameter in plain.named_parameters()}
    for checkpointed in (False, True):
        model = copy.deepcopy(tiled)
        if checkpointed:
            enable_checkpointing(model, {"use_reentrant": False})
        ddp = copy.deepcopy(model)
        accumulate(DistributedDataParallel(ddp), rank)
        check(ddp, want)
        mesh = init_device_mesh("cpu", (size,))
        for layer in model.model.layers:
            # A group of the norm alone: its weight is gathered for the call of the tiled module itself.
            fully_shard(layer.input_layernorm, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        accumulate(model, rank)
        check(model, want)
    return {}


CASES = {"tiled": train}
