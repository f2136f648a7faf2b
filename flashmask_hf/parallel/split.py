"""Split of rows over the ranks of a group, and the context for models on shards."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashmask_hf._numbers import check_tensor
from flashmask_hf.names import IGNORED, LABEL_WEIGHTS, SHIFT_LABEL_WEIGHTS, VECTORS
from flashmask_hf.parallel.collectives import Group, group_of
from flashmask_hf.torch_internals import device_assert

if TYPE_CHECKING:  # some builds of torch lack it
    from torch.distributed import ProcessGroup

_SHARDED = ("input_ids", "position_ids", "labels", "shift_labels", LABEL_WEIGHTS)
"""Batch keys with tokens in the last axis."""

_SHIFTED = {"labels": ("shift_labels", IGNORED), LABEL_WEIGHTS: (SHIFT_LABEL_WEIGHTS, 0)}
"""Batch keys of labels, with their names after the shift and what the last token gets."""

_compared: set[str] = set()
"""Names of the groups whose ranks had the same first batch."""


@dataclass(frozen=True, eq=False)
class RowSplit:
    """The query rows of every rank of a group; `sequence_parallel` makes it."""

    group: Group
    process_group: ProcessGroup
    rows: Tensor
    """int64 [N, S / N], the rows of each rank, ascending."""
    position_ids: Tensor
    """int [B or 1, S], of the whole row."""
    exchange: Literal["heads", "keys"] | None
    """The exchange; None chooses the one that sends less data."""
    order: Tensor | None
    """int64 [S], all ranks' rows one after another; None if 0..S - 1."""
    places: Tensor | None
    """int64 [S], the place of each row in `order`; None if `order` is."""

    @property
    def length(self) -> int:
        """Number of tokens of a whole row, S."""
        return self.rows.numel()

    @property
    def own_rows(self) -> Tensor:
        """The rows of this rank, int64 [S / N]."""
        return self.rows[self.group.rank]

    @property
    def own_positions(self) -> Tensor:
        """The positions of this rank's rows, int [B or 1, S / N]."""
        return self.position_ids.index_select(-1, self.own_rows.to(self.position_ids.device))

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's shard of a batch of whole rows, for a model call in the context.

        Mask indices stay whole. Labels and `label_weights` are shifted first, and become `shift_labels` and
        `shift_label_weights`. Divide this rank's summed loss by the number of labels of all ranks, and sum the
        gradients.

        Args:
            batch: `startend_row_indices`, `input_ids`, `position_ids` (default: the split's), and `labels` (and
                `label_weights`) or `shift_labels` [B, S].

        Raises:
            ValueError: mask indices are missing; a key cannot be split; a tensor has another length; `position_ids`
                differ from the split's; or, in a group's first call, its ranks have different batches.
        """
        if batch.get(VECTORS) is None:
            raise ValueError(f"{VECTORS} is missing; use a packing collator")
        self._compare_batches(batch)
        if batch.get("position_ids") is None:  # else the model would number its shard from 0
            batch = {**batch, "position_ids": self.position_ids.to(batch[VECTORS].device)}
        shard: dict[str, Any] = {VECTORS: batch[VECTORS]}
        for key, value in batch.items():
            if key == VECTORS or (key == "labels" and batch.get("shift_labels") is not None):
                continue
            if key not in _SHARDED:
                way = f"leave it out: {VECTORS} marks documents and padding"
                raise ValueError(f"the batch has {key!r}, which cannot be split over ranks; {way}")
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-1] != self.length:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{key} must have shape [B, {self.length}], as the split row has, got {got}")
            if key == "position_ids" and value.dim() == 2 and not self._has_positions(value):
                raise ValueError("position_ids of batch and sequence_parallel differ; pass the batch's to both")
            if key in _SHIFTED:
                key, filler = _SHIFTED[key]
                value = nn.functional.pad(value[:, 1:], (0, 1), value=filler)
            shard[key] = value.index_select(-1, self.own_rows.to(value.device))
        return shard

    def _has_positions(self, position_ids: Tensor) -> bool:
        """Return whether positions [B or 1, S] equal the split's; the host waits unless they are one tensor."""
        if position_ids is self.position_ids:
            return True
        own = self.position_ids.to(position_ids.device)
        batch, own_batch = position_ids.shape[0], own.shape[0]
        return (batch == own_batch or 1 in (batch, own_batch)) and bool((position_ids == own).all())

    def _compare_batches(self, batch: Mapping[str, Any]) -> None:
        """Raise a ValueError on every rank if tokens or mask indices differ in a group's first batch.

        Comparing later batches would synchronise the host.
        """
        if self.group.name in _compared:
            return
        given = [batch.get(name) for name in (VECTORS, "input_ids")]
        own = [zlib.crc32(x.cpu().numpy().tobytes()) for x in given if isinstance(x, Tensor)]
        every: list[Any] = [None] * self.group.size
        dist.all_gather_object(every, own, group=self.process_group)
        if any(one != own for one in every):
            raise ValueError(
                "the ranks of the group have different batches, but each computes a shard of the same rows; use no "
                "DistributedSampler or accelerator.prepare(dataloader) over these ranks"
            )
        _compared.add(self.group.name)


_active: RowSplit | None = None
"""The current split. Global, because autograd's threads, which recompute layers, do not see context variables."""


@contextlib.contextmanager
def sequence_parallel(
    group: ProcessGroup,
    rows: Tensor,
    position_ids: Tensor,
    *,
    exchange: Literal["heads", "keys"] | None = None,
) -> Iterator[RowSplit]:
    """Run models with attention "flashmask" on rows that are split over the ranks of a group.

    Layers that get a shard of the tokens and the mask indices of the whole row exchange heads or keys, and compute the
    attention of the whole row: any mask, windows, softcap and sinks. Run the backward in the context, too. Every rank
    must make the same calls. Calls with whole rows run as usual.

    Args:
        group: the ranks that share the rows; each has the same batch (the first `shard` checks it).
        rows: int64 [N, S / N], the rows of each rank, ascending (`split_rows`); the same on every rank.
        position_ids: int [B or 1, S], of whole rows; they measure sliding windows and trees.
        exchange: "heads" or "keys"; None selects the exchange that sends less data (`exchange_of`).

    Yields:
        RowSplit: its `shard` splits a batch.

    Raises:
        TypeError: `rows` or `position_ids` is no integer tensor.
        ValueError: an argument has a wrong shape or value. In a layer: heads do not divide for "heads", mask indices
            are missing or of another length, or `rope_type` is "longrope" or "dynamic".
        RuntimeError: in a layer, `position_ids` are missing or differ from the shard's, or mask indices were cut to the
            shard (device-side checks).

    Example:
        ```python
        mask = FlashMask(batch["startend_row_indices"], causal=True)
        rows = split_rows(mask, group.size(), heads=32, kv_heads=8)
        with sequence_parallel(group, rows, batch["position_ids"]) as split:
            shard = split.shard(batch)
            labels = shard.pop("shift_labels")
            logits = model(**shard, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / number_of_labels
            loss.backward()  # then sum the gradients over the group
        ```
    """
    split = make_split(group, rows, position_ids, exchange)
    with run_split(split):
        yield split


@contextlib.contextmanager
def run_split(split: RowSplit) -> Iterator[None]:
    """Run models on the shards of a split, as `sequence_parallel` does."""
    global _active
    before, _active = _active, split
    try:
        yield
    finally:
        _active = before


def active_split(length: int, vectors: Any) -> RowSplit | None:
    """Return the split of a layer with `length` query rows, or None if the layer has whole rows.

    Raises:
        ValueError: the layer has as many rows as a shard, but no mask indices, or another row's.
        RuntimeError: the mask indices were cut to the shard (a device-side check).
    """
    split = _active
    if split is None or length != split.rows.shape[1]:
        return None
    if vectors is None:
        problem = f"a layer has {length} rows, as many as a shard of a split row, but no {VECTORS}"
        raise ValueError(f"{problem}; pass the whole row's to the model")
    if not isinstance(vectors, Tensor) or vectors.dim() != 4:
        return None  # the layer refuses it
    if vectors.shape[2] == length:  # a whole row, unless its indices exceed it
        device_assert(
            (vectors <= length).all(),
            f"{VECTORS} of {length} tokens have rows past {length}, as if cut to a shard; pass {VECTORS} of the whole "
            f"row of {split.length} tokens, as RowSplit.shard does",
        )
        return None
    if vectors.shape[2] != split.length:
        got = list(vectors.shape)
        raise ValueError(f"{VECTORS} must have the whole split row, [B, 1, {split.length}, n], got {got}")
    return split


def refuse_rope_by_length(config: Any) -> None:
    """Raise a ValueError if a text model's rotary frequencies depend on the longest position of a call."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for kind in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        rope_type = kind.get("rope_type") or ""
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"rope_type={rope_type!r} depends on the longest position of a call, which differs between shards; "
                "leave each row on one rank (cp_size=1), or use a model with another rope_type"
            )


def make_split(process_group: ProcessGroup, rows: Tensor, position_ids: Tensor, exchange: Any = None) -> RowSplit:
    """Return a split; arguments and errors are as in `sequence_parallel`."""
    group = group_of(process_group)
    check_tensor("rows", rows, "an integer", f"[{group.size}, S / {group.size}]")
    check_tensor("position_ids", position_ids, "an integer", "[B, S]")
    if exchange not in ("heads", "keys", None):
        raise ValueError(f"exchange must be one of ('heads', 'keys') or None, got {exchange!r}")
    if rows.shape[0] != group.size:
        raise ValueError(f"rows must have shape [{group.size}, S / {group.size}], got {list(rows.shape)}")
    if position_ids.shape[1] != rows.numel():
        raise ValueError(f"position_ids must have the whole row, [B, {rows.numel()}], got {list(position_ids.shape)}")
    order = rows.flatten()
    natural = torch.arange(rows.numel(), device=rows.device)
    places = order.argsort()
    if not torch.equal(order[places], natural) or not bool((rows.diff() > 0).all()):
        raise ValueError(f"rows must hold each of 0..{rows.numel() - 1} once, ascending per rank")
    if torch.equal(order, natural):
        order = places = None
    return RowSplit(group, process_group, rows, position_ids, exchange, order, places)
