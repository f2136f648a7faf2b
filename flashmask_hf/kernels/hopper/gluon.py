"""Gluon, the part of Triton in which the Hopper kernels are written, under names that hold from Triton 3.6 to 3.9.

Gluon promises no stability, so kernel files import the language from here. This module imports without Gluon.
"""

from __future__ import annotations

import os
from typing import Any

import_failure: str | None = None
"""Why Gluon, or a part that the kernels need, cannot be imported, or None."""

try:
    import triton
    from triton._C.libtriton import ir
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _names = vars(tma)
    tma_load: Any = _names.get("async_load") or tma.async_copy_global_to_shared
    """(descriptor, coordinates, mbarrier, shared memory): start copying a tile to shared memory."""
    tma_store: Any = _names.get("async_store") or tma.async_copy_shared_to_global
    """(descriptor, coordinates, shared memory): start copying a tile from shared memory."""
    tma_store_wait: Any = tma.store_wait
    """(count): wait until all but `count` stores and reductions of this thread have read shared memory."""

    group_barrier: Any = vars(gl).get("thread_barrier") or vars(gl)["barrier"]
    """(): wait for all warps of this role."""

    def device_enum(enum: type) -> type:
        """Turn the integers of a class into compile-time constants for device code."""
        for name, value in list(vars(enum).items()):
            if type(value) is int:
                setattr(enum, name, gl.constexpr(value))
        enum.__triton_builtin__ = True  # pyright: ignore[reportAttributeAccessIssue]  # Triton rejects other classes
        return enum

    @builtin
    def _tma_reduce_add(tensor_desc, coord, src, _semantic: Any = None):
        coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coordinates, src.handle)

    tma_reduce_add: Any = _names.get("async_atomic_add") or _tma_reduce_add
    """(descriptor, coordinates, shared memory): start adding a tile to global memory."""

    def _assembly(
        text: str, constraints: str, args: list[Any], dtype: Any, semantic: Any, is_pure: bool = True, pack: int = 1
    ) -> Any:
        return gl.inline_asm_elementwise(
            text, constraints, args, dtype=dtype, is_pure=is_pure, pack=pack, _semantic=semantic
        )

    def _bar(instruction: str, barrier: Any, threads: Any, semantic: Any) -> None:
        barrier = _unwrap_if_constexpr(barrier)
        number, args = (str(barrier), []) if isinstance(barrier, int) else ("$1", [barrier])
        text = f"{instruction} {number}, {_unwrap_if_constexpr(threads)}; mov.u32 $0, 0;"
        _assembly(text, "=r,r" if args else "=r", args, gl.int32, semantic, is_pure=False)

    @builtin
    def named_barrier_sync(barrier, threads, _semantic: Any = None):
        """Wait at named barrier `barrier` (int or int32 scalar) until `threads` threads, these included, have arrived.

        Of 16, the compiler takes 0, 1 and one per role but the first.
        """
        _bar("bar.sync", barrier, threads, _semantic)

    @builtin
    def named_barrier_arrive(barrier, threads, _semantic: Any = None):
        """Arrive at a named barrier without waiting."""
        _bar("bar.arrive", barrier, threads, _semantic)

    @builtin
    def bits_below(bound, _semantic: Any = None):
        """Return int32 words with the bits below int32 `bound` set: none below 1, all from 32 on."""
        text = "{ .reg .s32 b; max.s32 b, $1, 0; bmsk.clamp.b32 $0, 0, b; }"
        return _assembly(text, "=r,r", [bound], gl.int32, _semantic)

    @builtin
    def keep_signed(x, flags, selector, _semantic: Any = None):
        """Return float32 `x` where the selected byte of int32 `flags` has its sign bit set, else -inf.

        The arguments broadcast. `selector` is 0x8888 for byte 0 to 0xBBBB for byte 3. Predicates would be too few.
        """
        text = (
            "{ .reg .b32 m, s; prmt.b32 m, $2, 0, $3; mov.b32 s, $1; "
            "lop3.b32 s, s, m, 0xff800000, 0xe2; mov.b32 $0, s; }"
        )
        return _assembly(text, "=f,f,r,r", [x, flags, selector], gl.float32, _semantic)

    @builtin
    def keep_marked(x, words, _semantic: Any = None):
        """Return float32 `x`, a product of one warpgroup, where its bit of int32 `words` is set, else 0.

        Both are [M, N / 8, 4, 2]. A thread holds two rows, in alternating pairs of elements, and a word per row.
        """
        shape = x.type.shape
        count = shape[0] * shape[1] * 8 // 128
        text = "{ .reg .pred p; .reg .b32 bit; "
        for i in range(count):
            text += (
                f"and.b32 bit, ${2 * count + (i & 2)}, {1 << (i // 4 * 2 + i % 2)}; setp.ne.b32 p, bit, 0; "
                f"selp.f32 ${i}, ${i}, 0f00000000, p; "
            )
        constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * count)
        return _assembly(text + "}", constraints, [x, words], gl.float32, _semantic, pack=count)

    @builtin
    def rescale(x, factors, _semantic: Any = None):
        """Return float32 accumulators `x` [64, N] of one warpgroup times `factors` [64, N], equal along a row.

        A warp with factors 1 skips the products. A thread holds two rows, in alternating pairs of elements.
        """
        count = x.type.shape[0] * x.type.shape[1] // 128
        low, high = f"${2 * count}", f"${2 * count + 2}"
        products = " ".join(f"mul.f32 ${i}, ${i}, {high if i & 2 else low};" for i in range(count))
        text = (
            f"{{ .reg .pred p, q; setp.neu.f32 p, {low}, 0f3F800000; setp.neu.f32 q, {high}, 0f3F800000; "
            f"or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; {products} DONE: }}"
        )
        constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)
        return _assembly(text, constraints, [x, factors], gl.float32, _semantic, pack=count)

    @builtin
    def wait_for_count(counter, count, _semantic: Any = None):
        """Wait until the int32 at `counter` is at least `count`, with acquire semantics.

        The thread sleeps between polls, which would delay the thread that counts.
        """
        text = (
            "{ .reg .pred p; .reg .s32 v; LOOK: ld.acquire.gpu.global.s32 v, [$1]; setp.ge.s32 p, v, $2; "
            "@p bra SEEN; nanosleep.u32 64; bra LOOK; SEEN: mov.u32 $0, 0; }"
        )
        args = [counter.to(gl.int64, _semantic=_semantic), count]
        _assembly(text, "=r,l,r", args, gl.int32, _semantic, is_pure=False)

    @builtin
    def wait_for_writes(_semantic: Any = None):
        """Wait until all TMA stores and reductions of this thread have written global memory."""
        _assembly("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], gl.int32, _semantic, is_pure=False)

    @builtin
    def opaque_zero(_semantic: Any = None):
        """Return an int32 0 unknown to the compiler, which keeps descriptors that depend on it inside a loop.

        Hoisted, they would take many registers.
        """
        return _assembly("mov.u32 $0, 0;", "=r", [], gl.int32, _semantic, is_pure=False)

except (ImportError, AttributeError, KeyError) as error:
    import_failure = f"Triton's Gluon lacks what they need ({error})"


def unavailable_reason() -> str | None:
    """Return why the kernels written in Gluon cannot be imported or run in this process, or None."""
    if import_failure is not None:
        return import_failure
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter does not run Gluon"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 6):
        return f"Triton {triton.__version__} is older than 3.6"
    return None
