"""Run a model on the packed tries of TRL's AsyncGRPO under "flashmask".

TRL packs a trie of rollouts in depth-first order for FlashAttention-3's varlen function: queries are segments of the
row, and keys are gathered along each path from the root. A rewrite of the backbone's call makes it one bound per key,
where its subtree ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.models import state_of, unwrap_peft
from flashmask_hf.hf.packed.rows import check_layers
from flashmask_hf.names import FLASHMASK, VECTORS
from flashmask_hf.torch_internals import device_assert

_PREFIX = "tree_"
_LAYOUT = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
_KEYWORDS = {*_LAYOUT, "tree_max_seqlen_q", "tree_max_seqlen_k"}


def run_tree_packing(model: Any) -> None:
    """Make a model, with a head and not wrapped for distributed training, take TRL's `tree_*` keywords.

    Its forward raises a ValueError for another attention or other keywords than TRL 1.16 passes, and if some layers do
    not receive the mask.
    """
    check_layers(model)
    backbone = unwrap_peft(model).base_model
    if _read_layout not in state_of(backbone).rewrites:
        state_of(backbone).rewrites += (_read_layout,)
        backbone.register_forward_pre_hook(_require_flashmask, with_kwargs=True)


def _given(named: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's description of a trie in a call."""
    return {name: value for name, value in named.items() if name.startswith(_PREFIX) and value is not None}


def _require_flashmask(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _given(kwargs):  # with "flashmask", the rewrite has removed it
        name = backbone.config._attn_implementation
        raise ValueError(
            f"the packed row of AsyncGRPO needs attn_implementation='flashmask', but the model has {name!r}; call "
            "model.set_attn_implementation('flashmask')"
        )


def _read_layout(call: Call) -> dict[str, Any]:
    """Return the arguments with mask indices in place of TRL's description of a trie."""
    given = _given(call.named)
    if call.implementation != FLASHMASK or not given:
        return call.named
    if given.keys() != _KEYWORDS:
        problem = f"AsyncGRPO describes its packed row by {sorted(given)}, not by {sorted(_KEYWORDS)}"
        raise ValueError(f"{problem} as TRL 1.16 does; install that version of TRL")
    rest = {name: value for name, value in call.named.items() if name not in _KEYWORDS}
    return rest | {VECTORS: tree_vectors(call.named.get("position_ids"), *(given[name] for name in _LAYOUT))}


def tree_vectors(position_ids: Tensor | None, kv_index: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Return the mask indices of a packed trie, without synchronising the host.

    Rows cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1 are segment s. They see the path kv_index[cu_seqlens_k[s]] ..
    kv_index[cu_seqlens_k[s + 1] - 1], which ends with the segment itself, causally.

    Args:
        position_ids: int64 [1, N], the depth of each row in the trie.
        kv_index: int64 [K].
        cu_seqlens_q: int32 [S + 1].
        cu_seqlens_k: int32 [S + 1].

    Returns:
        `startend_row_indices`, int32 [1, 1, N, 1].

    Raises:
        ValueError: there are no positions [1, N], or another shape is wrong.
        RuntimeError: positions are not depths, a path does not end with its segment, or the segments that see a key do
            not follow the key's segment (a device-side check).
    """
    shapes = [list(x.shape) for x in (kv_index, cu_seqlens_q, cu_seqlens_k)]
    if position_ids is None or position_ids.dim() != 2 or len(position_ids) != 1:
        got = None if position_ids is None else list(position_ids.shape)
        raise ValueError(f"a packed trie needs position_ids [1, N], the depths of its one row, got {got}")
    if any(len(shape) != 1 for shape in shapes) or shapes[1] != shapes[2] or len(cu_seqlens_q) < 2:
        raise ValueError(f"tree_kv_index must be [K], tree_cu_seqlens_q and tree_cu_seqlens_k [S + 1], got {shapes}")
    depth = position_ids[0].to(torch.int64)
    device, length, keys, segments = depth.device, len(depth), len(kv_index), len(cu_seqlens_q) - 1
    row, place = torch.arange(length, device=device), torch.arange(keys, device=device)
    edges_q, edges_k = cu_seqlens_q.to(torch.int64), cu_seqlens_k.to(torch.int64)
    in_range = (kv_index >= 0) & (kv_index < length)
    key = kv_index.to(torch.int64).clamp(0, length - 1)
    own = torch.searchsorted(edges_q, row, right=True) - 1  # segment of each row
    path = torch.searchsorted(edges_k, place, right=True).clamp(1, segments) - 1  # segment that sees each entry
    row_of_place = place - edges_k[path + 1] + edges_q[path + 1]  # if the path ends with its segment
    ends_with_segment = (key == row_of_place) | (row_of_place < edges_q[path])
    is_depth = depth[key] == place - edges_k[path]
    last = own.scatter_reduce(0, key, path, "amax")
    first = own.scatter_reduce(0, key, path, "amin")
    count = torch.zeros_like(own).scatter_add(0, key, torch.ones_like(key))
    device_assert(
        (edges_q.diff() > 0).all()
        & in_range.all()
        & ends_with_segment.all()
        & is_depth.all()
        & (first == own).all()
        & (count == last - own + 1).all(),
        "AsyncGRPO's packed row is not a trie in depth-first order with depths as position_ids; install trl==1.16",
    )
    return edges_q[last + 1].to(torch.int32)[None, None, :, None]
