"""Vectors per head under tensor parallelism, where each process computes some of the heads and takes their vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashmask_hf.checks import is_one_of
from flashmask_hf.hf.mask_cache import cached_mask
from flashmask_hf.names import VECTORS

__all__ = ["vectors_of_local_heads"]


def vectors_of_local_heads(module: nn.Module, vectors: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return the vectors of the heads that this process computes; without tensor parallelism, all of them.

    The vectors are those of the whole model in every process, so that a number of heads means the same everywhere: the
    key-value heads of a model are often as many as the query heads of one process.

    Args:
        module: the attention layer. Tensor parallelism is seen by its parameters, which are sharded DTensors.
        vectors: int32 [B, 1 or Hkv or Hq, S, n], of the whole model.
        heads: number of query heads that this process computes.
        kv_heads: number of key-value heads that it computes.

    Raises:
        ValueError: under tensor parallelism, the vectors have another number of heads than the whole model.
        NotImplementedError: it is not known which heads this process computes.
    """
    shard = None if vectors.shape[1] == 1 else _shard_of(module)
    if shard is None:
        return vectors
    rank, size = shard
    whole = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if whole == heads:  # projections are sharded, but their outputs are gathered
        return vectors
    if whole != heads * size:
        raise NotImplementedError(
            f"{VECTORS} per head: of {whole} query heads (num_attention_heads of the layer's config), this process "
            f"computes {heads}, which is not the part of one of {size} processes of tensor parallelism; pass vectors "
            "that all heads share, [B, 1, S, n], or leave tensor parallelism or the split of rows out"
        )
    count = vectors.shape[1]
    if not is_one_of(count, kv_heads * size, heads * size):
        raise ValueError(
            f"{VECTORS} has {count} heads; under tensor parallelism it must have those of the whole model, 1, "
            f"Hkv = {kv_heads * size} or Hq = {whole}, of which each process takes its own"
        )
    width = count // size
    return cached_mask(
        (vectors,),
        ("tensor parallel", rank, size),
        lambda: vectors.narrow(1, rank * width, width).clone(),
        per_forward=False,
    )


def _shard_of(module: nn.Module) -> tuple[int, int] | None:
    """Return this process's rank and the number of processes over which a layer's parameters are sharded, or None."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.tensor import DTensor  # slow to import, and missing in builds without processes

    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            dims = [i for i, x in enumerate(parameter.placements) if not x.is_replicate() and mesh.size(i) > 1]
            if len(dims) > 1:
                raise NotImplementedError(
                    f"{VECTORS} per head: a parameter of the layer is sharded over {len(dims)} dimensions of a mesh, "
                    "which do not tell its heads; pass vectors that all heads share, [B, 1, S, n]"
                )
            if dims:
                return mesh.get_local_rank(dims[0]), mesh.size(dims[0])
    return None
