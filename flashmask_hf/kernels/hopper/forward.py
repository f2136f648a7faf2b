"""The forward on Hopper (sm_90a): supported tensors, tiles and launches of `forward_kernel`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from flashmask_hf.kernels.hopper.descriptors import row_template
from flashmask_hf.kernels.hopper.forward_kernel import Form, forward_kernel
from flashmask_hf.kernels.hopper.head_dims import Widths, contracted, unsupported_head_dims, widths_of
from flashmask_hf.kernels.launch.descriptors import describable, describable_layout
from flashmask_hf.kernels.launch.launcher import Launch
from flashmask_hf.kernels.launch.problem import Problem
from flashmask_hf.kernels.launch.tensor_layout import packed_layout
from flashmask_hf.kernels.shared.configs import multiprocessors
from flashmask_hf.kernels.shared.plan_kernels import JOINED_ROWS, join_rows
from flashmask_hf.tile_plan import COLUMNS, Plan, plan_columns
from flashmask_hf.torch_internals import current_stream, is_capturing


class Config(NamedTuple):
    """Tiles and registers of the kernel."""

    warpgroups: int
    """Consumer warpgroups, of 64 rows each."""
    columns: int
    """Keys per tile."""
    stages: int
    """Tiles of keys, and of values, in flight."""
    consumer_registers: int
    """Per consumer thread."""
    helper_registers: int
    """Per thread of the other roles."""
    q_stages: int = 2
    """Query tiles in flight."""

    @property
    def rows(self) -> int:
        """Query rows per tile."""
        return 64 * self.warpgroups


_FORWARD = {
    Widths(64): Config(2, 128, 2, 216, 72),
    Widths(128): Config(2, 128, 2, 232, 40),
    Widths(128, 64): Config(2, 128, 2, 232, 40, q_stages=1),
    Widths(256): Config(2, 64, 2, 232, 40, q_stages=1),
}
"""Configurations by widths of the tiles."""

# Head dim 64 leaves registers for a third consumer. On an H200 (bfloat16), tall tiles are up to 25% faster where rows
# see many key tiles, and up to 70% slower in short documents or narrow windows, with more key tiles at their edges.
_TALL = {Widths(64): Config(3, 128, 2, 160, 32)}
"""Configurations with tall tiles, by widths (`_configs`)."""
_TALL_QUERIES = 4096
"""Fewest queries per head for tall tiles."""
_TALL_ROWS = 1 << 18
"""Fewest queries of all heads for tall tiles."""
_TALL_TILES = 10
"""Fewest key tiles per list of the plan, on average, for tall tiles (`join_rows`)."""


def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    """Return why the Hopper kernels cannot run these tensors, or None."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return f"tensors on {device} (it needs a Hopper GPU, compute capability 9.0)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {dtype} (it takes bfloat16 and float16)"
    return unsupported_head_dims(head_dim, v_head_dim)


def prepare_forward(problem: Problem, ordered: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Prepare the forward for tensors of one layout.

    Returns:
        (q, k, v, sinks, indices, plan, order) -> (out, lse), without `order` unless `ordered`. `order`, int32
        [B, Hq, Sq], names the target of each row of the output. lse keeps the order of q.
    """
    given = problem.q, problem.k, problem.v
    q, k, v = map(describable_layout, given)
    copies = (q, k, v) != given
    batch, heads, q_len, head_dim = q.shape
    v_head_dim = v.shape[3]
    widths = widths_of(head_dim, v_head_dim)
    width, tail = widths
    kv_heads, kv_len = k.shape[1:3]
    mask_batch, mask_heads, n_q, n_kv = problem.plan_shape
    configs = _configs(q.shape, widths, problem.softcap != 0, ordered)
    joins = any(config.rows == JOINED_ROWS for config in configs)
    least_tiles = -(-_TALL_TILES * COLUMNS // plan_columns(kv_len)) if len(configs) > 1 else 0
    out_layout = packed_layout(*q.shape[:3], v_head_dim, dtype=q.dtype, device=q.device, order=(0, 2, 1, 3))
    new_out = out_layout.allocator()
    new_lse = packed_layout(batch, heads, q_len, dtype=torch.float32, device=q.device).allocator()
    programs = multiprocessors(q.device)
    launches = []
    for config in configs:
        n_rows = -(-q_len // config.rows)
        n_tiles = n_rows * heads * batch
        joined = config.rows == JOINED_ROWS
        persistent = n_tiles > programs
        launch = Launch(
            forward_kernel,
            min(n_tiles, programs),
            n_tiles, n_rows, heads, kv_heads, mask_batch, mask_heads, q_len, kv_len,
            n_rows if joined else n_q, n_kv, *problem.factors,
            descriptors=(
                row_template(q, 64, width), row_template(k, config.columns, width),
                row_template(v, config.columns, width), row_template(out_layout, 64, width),
                *([row_template(q, 64, tail), row_template(k, config.columns, tail)] if tail else []),
            ),
            FORM=Form(
                **problem.constants, SCATTER=ordered, SINKS=problem.sinks, WARPGROUPS=config.warpgroups,
                SUBTILES=plan_columns(kv_len) // config.columns, Q_STAGES=config.q_stages, STAGES=config.stages,
                PERSISTENT=persistent, DEPTH=min(contracted(head_dim), width),
                TAIL_DEPTH=max(contracted(head_dim) - width, 0), V_HEAD_DIM=v_head_dim,
            ),
            CONSUMER_REGISTERS=config.consumer_registers, HELPER_REGISTERS=config.helper_registers, num_warps=4,
        )  # fmt: skip
        launches.append((launch, joined, persistent))

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        indices: Tensor,
        plan: Plan,
        order: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if copies:
            q, k, v = map(describable, (q, k, v))
        out, lse = new_out(), new_lse()
        indices = indices.contiguous()
        sinks = None if sinks is None else sinks.contiguous()
        lists = joined_lists = plan.tiles, plan.counts
        tails = (q, k) if tail else (None, None)
        chosen_rows = None
        if joins:
            *joined_lists, chosen_rows = join_rows(plan, q_len, least_tiles)
        for launch, joined, persistent in launches:
            tiles, counts = joined_lists if joined else lists
            counter = _counter(q) if persistent else None
            out_rows = out if ordered else None
            launch(q, k, v, out, *tails, out_rows, order, lse, sinks, indices, tiles, counts, counter, chosen_rows)
        return out, lse

    return run


def _configs(shape: torch.Size, widths: Widths, capped: bool, ordered: bool) -> list[Config]:
    """Return the configurations to launch: the usual one and, in long calls, one with tall tiles.

    The device decides which launch works, for the whole call. The two sum a row in different orders, so other masks in
    the batch can change a row's rounding. A softcap's tanh takes registers that three consumers lack. `ordered` rows
    have short lists.
    """
    batch, heads, q_len, _ = shape
    many = q_len >= _TALL_QUERIES and batch * heads * q_len >= _TALL_ROWS
    tall = [_TALL[widths]] if widths in _TALL and many and not capped and not ordered else []
    return [_FORWARD[widths], *tall]


_counters: dict[tuple[int, int], Tensor] = {}
"""Work item counters by device and stream."""


def _counter(q: Tensor) -> Tensor:
    """Return int32 [1] zero for a launch that leaves it 0; launches on one stream share it.

    A CUDA graph may run on any stream and has its own.
    """
    if not q.is_cuda or is_capturing(q):
        return torch.zeros(1, dtype=torch.int32, device=q.device)
    stream = q.get_device(), current_stream(q.get_device())
    found = _counters.get(stream)
    if found is None:
        # Memory pools bind to a thread: this one's may belong to a graph's warm-up, which is freed later.
        with ThreadPoolExecutor(1) as thread:
            found = _counters[stream] = thread.submit(_zero, torch.cuda.current_stream(q.device)).result()
    return found


def _zero(stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.zeros(1, dtype=torch.int32, device=stream.device)
