"""Attention functions that `attention.py` times, behind one interface, and the forms of a mask that they need.

- `flashmask`, `flashmask_deterministic`, `flashmask_triton` (the portable kernels): `flashmask_attention`.
- `flex_attention`, `flex_flash`: FlexAttention with its Triton and its FlashAttention-4 backend (flash-attn-4).
- `fa4`: FlashAttention-4 (flash-attn-4): dense for full, causal and sliding-window masks, varlen for documents.
- `cudnn_flex`: `cudnn.flex_attention` (nvidia-cudnn-frontend 1.32).
- `cudnn`, `sdpa` (FlashAttention-2): SDPA, for full and causal masks; `sdpa_dense`: with a dense mask.
- `hash_16`, `drop_30`, `drop_50`: `flashmask_hf.sparse` with 16 random buckets per head, or with that percentage of the
  queries and keys of each head dropped.
- `flashmask_dropout` (the portable kernels), `sdpa_dropout`, `sdpa_dense_dropout`: with dropout 0.1.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pad_sequence

from flashmask_hf import FlashMask, flashmask_attention, sparse
from flashmask_hf._call.arguments import Arguments
from flashmask_hf._call.call import resolve
from flashmask_hf._call.operators import flash_attn_forward, plan_of

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

ROWS = 1024  # query rows that are dense at a time when a mask is converted
DENSE_LIMIT = 8192  # most query rows that `sdpa_dense` runs
DROPOUT = 0.1
BOUNDS_LIMIT = 2**31  # numbers in a table of row bounds; kernels index it with 32 bits


class CannotExpress(Exception):
    """Error of a provider that has no form for a mask."""


class Case(NamedTuple):
    """A mask and the tensors of a measurement."""

    family: str
    mask: FlashMask
    q: Tensor
    """[B, H, Sq, D]; k [B, Hkv, S, D] and v [B, Hkv, S, Dv] likewise; laid out as [B, S, H, D] in memory."""
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Provider:
    """An attention function.

    Attributes:
        prepare: returns a function that makes the provider's mask of a case and returns the attention under it; raises
            `CannotExpress` if there is no such mask.
        module: the module that must be installed, or "".
        package: the distribution whose version a row names, "cudnn" for PyTorch's cuDNN, or "".
        makes_mask: whether a new mask costs time.
        visible: the visible pairs of a case, batch entry, key-value head and query rows, bool [group, rows, Skv]; None
            for the case's mask.
        checked: whether results are compared; each provider with dropout draws its own pattern.
    """

    prepare: Callable[[Case], Callable[[], Attention]]
    module: str = ""
    package: str = ""
    makes_mask: bool = True
    visible: Callable[[Case, int, int, slice], Tensor] | None = None
    checked: bool = True

    def installed(self) -> bool:
        """Return whether the module is there."""
        names = self.module.split(".") if self.module else []
        return all(importlib.util.find_spec(".".join(names[: i + 1])) is not None for i in range(len(names)))

    def version(self) -> str:
        """Return the package and its version, or ""."""
        if self.package == "cudnn":
            return f"cuDNN {torch.backends.cudnn.version()}"
        return f"{self.package} {importlib.metadata.version(self.package)}" if self.package else ""


def _one_mask(mask: FlashMask) -> FlashMask:
    if mask.indices.shape[:2] != (1, 1):
        raise CannotExpress("this form of the mask is the same for all rows and all heads")
    return mask


def visible_pairs(mask: FlashMask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's mask function of a mask with one batch entry and one head."""
    intervals = [(start[0, 0].contiguous(), end[0, 0].contiguous()) for start, end in _one_mask(mask).intervals()]
    causal, offset = mask.causal, mask.kv_len - mask.row_count()

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (i + offset >= j) if causal else (i >= 0)
        for start, end in intervals:
            seen = seen & ((i < start[j]) | (i >= end[j]))
        return seen

    return visible


def row_bounds(mask: FlashMask, copies: int = 1) -> Tensor:
    """Return the mask of `cudnn.flex_attention`: row i sees the keys [0, F[0, i]), [F[1, i], F[2, i]) and so on.

    The last bound is repeated in rows with fewer.

    Returns:
        F, int32 [2k + 1, copies * Sq], for a mask of one batch entry and head, and `copies` batch entries.

    Raises:
        CannotExpress: there are more than 2**31 bounds.
    """
    rows, found, longest = mask.row_count(), list[Tensor](), 0
    for first in range(0, rows, ROWS):
        visible = mask.rows(slice(first, min(first + ROWS, rows))).to_dense()[0, 0].int()
        changed = F.pad(F.pad(visible, (1, 0), value=1), (0, 1)).diff() != 0
        found += changed.nonzero()[:, 1].int().split(changed.sum(1).tolist())
        longest = max(longest, *map(len, found[first:]))
        if longest * rows * copies >= BOUNDS_LIMIT:
            raise CannotExpress(f"{longest} bounds for each of {rows * copies} rows are more than 2^31 numbers")
    return pad_sequence(found).cummax(0).values.repeat(1, copies)


def document_bounds(mask: FlashMask, copies: int = 1) -> Tensor:
    """Return the bounds of the documents of `copies` batch entries, int32 [documents + 1]."""
    ends = mask.indices[0, 0, :, 0].unique_consecutive()  # each key is hidden from the end of its document on
    starts = torch.cat([ends.new_zeros(1), ends[:-1]]) + mask.kv_len * ends.new_tensor(range(copies))[:, None]
    return torch.cat([starts.flatten(), starts.new_tensor([mask.kv_len * copies])]).int()


def _flashmask(case: Case, **options: Any) -> Callable[[], Attention]:
    if "dropout" in options:
        options["dropout_seed"] = torch.tensor([0], device=case.q.device)

    def make() -> Attention:
        fresh = FlashMask(case.mask.indices, case.mask.causal)  # without a cached plan
        plan_of(fresh, case.mask.row_count())
        return lambda q, k, v: flashmask_attention(q, k, v, fresh, **options)

    return make


def planned(name: str, case: Case) -> Attention | None:
    """Return flashmask with a plan made before, as a model's layers have it; None for others."""
    impl = {"flashmask": None, "flashmask_triton": "triton"}
    if name not in impl or case.q.shape[2] == 1:
        return None
    plan = plan_of(case.mask, case.mask.row_count())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = resolve(q, k, v, case.mask, None, Arguments(impl=impl[name]))
        return flash_attn_forward(q, k, v, None, case.mask.indices, *plan, None, call.causal, *call.arguments)[0]

    return attend


_compiled_flex = torch.compile(flex_attention, dynamic=False)


def _flex(case: Case, backend: str | None = None) -> Callable[[], Attention]:
    options: Any = None if backend is None else {"BACKEND": backend}
    block = (256, 128) if backend == "FLASH" else 128  # FlashAttention-4 processes two tiles of queries at a time
    visible = visible_pairs(case.mask)
    rows, keys, device = case.mask.row_count(), case.mask.kv_len, str(case.mask.device)

    def make() -> Attention:
        blocks = create_block_mask(
            visible, None, None, rows, keys, device=device, BLOCK_SIZE=block, _compile=device != "cpu"
        )
        return lambda q, k, v: _compiled_flex(q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=options)

    return make


def _swapped(attend: Callable[..., Any], **options: Any) -> Attention:

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def _fa4(case: Case) -> Callable[[], Attention]:
    family, mask, copies = case.family, case.mask, case.q.shape[0]
    if family not in ("full", "causal", "sliding_window", "document", "causal_document"):
        raise CannotExpress("FlashAttention-4 alone has no form for it (FlexAttention with FLASH is its way)")
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if family in ("full", "causal"):
        return lambda: _swapped(flash_attn_func, causal=mask.causal)
    if family == "sliding_window":
        window = int((mask.rows(slice(mask.row_count() - 1, None)).to_dense()).sum())
        return lambda: _swapped(flash_attn_func, causal=True, window_size=(window - 1, 0))
    bounds = document_bounds(mask, copies)
    longest = int(bounds.diff().max())
    options = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), causal=mask.causal, **options)
        return (out[0] if isinstance(out, tuple) else out).unflatten(0, (copies, -1))

    return lambda: _swapped(varlen)


def _cudnn_flex(case: Case) -> Callable[[], Attention]:
    bounds = row_bounds(_one_mask(case.mask), case.q.shape[0])[None].contiguous()
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    def make() -> Attention:
        with torch.enable_grad():  # a plan made without gradients has no backward
            plan = create_mask_plan(bounds, *(x.transpose(1, 2) for x in case[2:]))
        return _swapped(flex_attn_func, mask_plan=plan)

    return make


def _sdpa(backend: SDPBackend, case: Case, dropout: float = 0.0) -> Callable[[], Attention]:
    if case.family not in ("full", "causal"):
        raise CannotExpress("SDPA without a dense mask is full or causal")
    causal = case.mask.causal
    if causal and case.mask.row_count() != case.mask.kv_len:
        raise CannotExpress("SDPA's is_causal aligns the first query with the first key, not the last ones")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            grouped = q.shape[1] > k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, None, dropout, causal, enable_gqa=grouped)

    return lambda: attend


def _sdpa_dense(case: Case, dropout: float = 0.0) -> Callable[[], Attention]:
    if case.mask.row_count() > DENSE_LIMIT:
        raise CannotExpress(f"a dense mask of more than {DENSE_LIMIT} rows is too large")
    group, decodes = case.q.shape[1] // case.k.shape[1], case.q.shape[2] == 1

    def make() -> Attention:
        visible = case.mask.to_dense().contiguous()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if decodes:
                rows = q.unflatten(1, (-1, group)).squeeze(3)
                return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible).flatten(1, 2)[:, :, None]
            return F.scaled_dot_product_attention(q, k, v, visible, dropout, enable_gqa=group > 1)

        return attend

    return make


def _chosen(case: Case, kind: str, amount: float) -> tuple[Tensor, Tensor]:
    """Draw buckets, or which are kept, of queries and keys: [B, H, S]."""
    generator = torch.Generator(case.q.device).manual_seed(case.q.shape[2])
    shape, options = case.q.shape[:3], {"generator": generator, "device": case.q.device}
    if kind == "hash":
        q, k = (torch.randint(int(amount), shape, **options) for _ in range(2))
    else:
        q, k = (torch.rand(shape, **options) >= amount / 100 for _ in range(2))
    return q, k


def _sparse(kind: str, amount: int) -> Provider:
    def prepare(case: Case) -> Callable[[], Attention]:
        chosen = _chosen(case, kind, amount)
        if kind == "drop":
            return lambda: lambda q, k, v: sparse.qk_sparse_attention(q, k, v, *chosen)
        return lambda: lambda q, k, v: sparse.hash_sparse_attention(q, k, v, *chosen, n_buckets=amount)

    def visible(case: Case, entry: int, head: int, rows: slice) -> Tensor:
        q, k = (x[entry, head] for x in _chosen(case, kind, amount))
        pairs = q[rows, None] & k if kind == "drop" else q[rows, None] == k
        return case.mask.rows(rows).to_dense()[0] & pairs

    return Provider(prepare, makes_mask=False, visible=visible)


PROVIDERS: dict[str, Provider] = {
    "flashmask": Provider(_flashmask),
    "flashmask_deterministic": Provider(partial(_flashmask, deterministic=True)),
    "flashmask_triton": Provider(partial(_flashmask, impl="triton")),
    "flex_attention": Provider(_flex),
    "flex_flash": Provider(partial(_flex, backend="FLASH"), "flash_attn.cute", "flash-attn-4"),
    "fa4": Provider(_fa4, "flash_attn.cute", "flash-attn-4", makes_mask=False),
    "cudnn_flex": Provider(_cudnn_flex, "cudnn", "nvidia-cudnn-frontend"),
    "cudnn": Provider(partial(_sdpa, SDPBackend.CUDNN_ATTENTION), package="cudnn", makes_mask=False),
    "sdpa": Provider(partial(_sdpa, SDPBackend.FLASH_ATTENTION), makes_mask=False),
    "sdpa_dense": Provider(_sdpa_dense),
    "flashmask_dropout": Provider(partial(_flashmask, dropout=DROPOUT), checked=False),
    "sdpa_dropout": Provider(
        partial(_sdpa, SDPBackend.FLASH_ATTENTION, dropout=DROPOUT), makes_mask=False, checked=False
    ),
    "sdpa_dense_dropout": Provider(partial(_sdpa_dense, dropout=DROPOUT), checked=False),
    "hash_16": _sparse("hash", 16),
    "drop_30": _sparse("drop", 30),
    "drop_50": _sparse("drop", 50),
}
