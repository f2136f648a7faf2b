"""Split of rows over the processes of a group, and the context in which models run on their parts."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flashmask_hf.names import IGNORED, VECTORS
from flashmask_hf.parallel.collectives import Group, group_of
from flashmask_hf.torch_internals import device_assert

if TYPE_CHECKING:  # builds of torch without it have no processes to exchange with
    from torch.distributed import ProcessGroup

__all__ = [
    "EXCHANGES",
    "RowSplit",
    "active_split",
    "make_split",
    "refuse_rope_by_length",
    "run_split",
    "sequence_parallel",
]

EXCHANGES = ("heads", "keys")
"""Names of the exchanges around attention (`flashmask_hf.parallel.exchange`)."""

_compared: set[str] = set()
"""Names of the groups whose processes had the same batch when they first split one."""


@dataclass(frozen=True, eq=False)
class RowSplit:
    """The query rows of every process of a group; `sequence_parallel` makes it."""

    group: Group
    process_group: ProcessGroup
    rows: Tensor
    """int64 [N, S / N], the rows of each process, ascending."""
    position_ids: Tensor
    """int [B or 1, S], of the whole row."""
    exchange: Literal["heads", "keys"] | None
    """The exchange to take, or None for that which sends less."""
    order: Tensor | None
    """int64 [S], the rows of all processes one after another; None if that is 0..S - 1."""
    places: Tensor | None
    """int64 [S], the place of each row in `order`; None if `order` is."""

    @property
    def length(self) -> int:
        """Number of tokens of a whole row, S."""
        return self.rows.numel()

    @property
    def own_rows(self) -> Tensor:
        """The rows of this process, int64 [S / N]."""
        return self.rows[self.group.rank]

    @property
    def own_positions(self) -> Tensor:
        """The positions of this process's rows, int [B or 1, S / N]."""
        return self.position_ids.index_select(-1, self.own_rows.to(self.position_ids.device))

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this process's part of a batch of whole rows, for a model call in the context.

        Labels are shifted first, so that none is lost at the edge of a part, and are called `shift_labels`. A loss
        from them is a sum over this process's tokens; divide it by the number of labels of all processes, and sum the
        gradients. The mask vectors stay whole. A group's first call compares the batches of its processes.

        Args:
            batch: as the collators of packed rows make it: `input_ids`, `position_ids` (None or missing for those of
                the split), `startend_row_indices`, and `labels` [B, S], which the loss is to shift, or `shift_labels`
                (and `path_weights`) [B, S] or [B, W, S].

        Raises:
            ValueError: the mask vectors are missing, or a key is there of which it is not known how it is split; a
                tensor's length is another; `position_ids` differ from those of the split; or, in a group's first
                call, its processes have different batches.
        """
        if batch.get(VECTORS) is None:
            raise ValueError(
                f"{VECTORS} is missing, which says what the parts of a row may see; use a packing collator"
            )
        self._compare_batches(batch)
        if batch.get("position_ids") is None:  # the model would number its part from end to end
            batch = {**batch, "position_ids": self.position_ids.to(batch[VECTORS].device)}
        part: dict[str, Any] = {}
        for key, value in batch.items():
            if key == VECTORS:
                part[key] = value
                continue
            if key == "labels" and batch.get("shift_labels") is not None:
                continue
            if key not in ("input_ids", "position_ids", "labels", "shift_labels", "path_weights"):
                raise ValueError(
                    f"the batch has {key!r}, which cannot be split over processes; leave it out (padding and documents "
                    f"are told by {VECTORS})"
                )
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-1] != self.length:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{key} must have shape [B, {self.length}], as the split row has, got {got}")
            if key == "position_ids" and value.dim() == 2 and not self._has_positions(value):
                raise ValueError(
                    "position_ids of the batch differ from those that sequence_parallel was given, by which attention "
                    "measures; pass the batch's own to sequence_parallel"
                )
            if key == "labels":
                key, value = "shift_labels", nn.functional.pad(value[:, 1:], (0, 1), value=IGNORED)
            part[key] = value.index_select(-1, self.own_rows.to(value.device))
        return part

    def _has_positions(self, position_ids: Tensor) -> bool:
        """Return whether positions [B or 1, S] are the split's. Unless they are its tensor, the host waits for them."""
        if position_ids is self.position_ids:
            return True
        own = self.position_ids.to(position_ids.device)
        batch, own_batch = position_ids.shape[0], own.shape[0]
        return (batch == own_batch or 1 in (batch, own_batch)) and bool((position_ids == own).all())

    def _compare_batches(self, batch: Mapping[str, Any]) -> None:
        """Raise a ValueError in every process if tokens or mask vectors differ, until they have once been the same.

        Later batches are not compared, because the host would wait for the device in every step.
        """
        if self.group.name in _compared:
            return
        given = [batch.get(name) for name in (VECTORS, "input_ids")]
        own = [zlib.crc32(x.cpu().numpy().tobytes()) for x in given if isinstance(x, Tensor)]
        every: list[Any] = [None] * self.group.size
        dist.all_gather_object(every, own, group=self.process_group)
        if any(one != own for one in every):
            raise ValueError(
                "the processes of the group have different batches, but each computes a part of the same rows; give "
                "all of them the same, without a DistributedSampler or accelerator.prepare(dataloader) over these "
                "processes, which deal batches out"
            )
        _compared.add(self.group.name)


_active: RowSplit | None = None
"""The split in whose context models run. It is global because autograd recomputes checkpointed layers in threads of its
own, which do not see context variables."""


@contextlib.contextmanager
def sequence_parallel(
    group: ProcessGroup,
    rows: Tensor,
    position_ids: Tensor,
    *,
    exchange: Literal["heads", "keys"] | None = None,
) -> Iterator[RowSplit]:
    """Run models with attention "flashmask" on parts of rows, of which each process of a group holds one.

    In the context, a layer whose rows are a part, and whose mask vectors are those of the whole row, exchanges heads or
    keys with the other processes, so that attention is that of the whole row: under any mask, with windows, softcap and
    sinks. Forward and backward belong into the context, because checkpointed layers run again in the backward, and
    every process must make the same calls. Calls with whole rows, as in evaluation and generation, run as without it.

    Args:
        group: the processes that share the rows, each of which has the same batch (the first `shard` checks it).
        rows: int64 [N, S / N], the same in every process: which rows each one holds, ascending (`split_rows`).
        position_ids: int [B or 1, S], of the whole rows; sliding windows and trees are measured by them.
        exchange: "heads" or "keys" to take that one; None takes that which sends less
            (`flashmask_hf.parallel.exchange.exchange_of`).

    Yields:
        RowSplit: whose `shard` splits a batch.

    Raises:
        TypeError: `rows` or `position_ids` is no integer tensor.
        ValueError: `rows` has not one part per process, or its parts are not ascending or do not hold each row once;
            `position_ids` is not [B, S]; or `exchange` is another name. In a layer: "heads" are asked for and do not
            divide, mask vectors are missing or of another length, or the model's rotary positions depend on the
            longest one (`rope_type` "longrope" or "dynamic").
        RuntimeError: in a layer, `position_ids` are not those of its part, as in a model call without them, or mask
            vectors were cut to the part (device-side checks).

    Example:
        ```python
        mask = FlashMask(batch["startend_row_indices"], causal=True)
        rows = split_rows(mask, group.size(), heads=32, kv_heads=8)
        with sequence_parallel(group, rows, batch["position_ids"]) as split:
            part = split.shard(batch)
            labels = part.pop("shift_labels")
            logits = model(**part, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / number_of_labels
            loss.backward()  # then sum the gradients over the group
        ```
    """
    split = make_split(group, rows, position_ids, exchange)
    with run_split(split):
        yield split


@contextlib.contextmanager
def run_split(split: RowSplit) -> Iterator[None]:
    """Run models on the parts of a split, as `sequence_parallel` does."""
    global _active
    before, _active = _active, split
    try:
        yield
    finally:
        _active = before


def active_split(length: int, vectors: Any) -> RowSplit | None:
    """Return the split that a layer of `length` query rows is a part of; None if it has whole rows.

    Raises:
        ValueError: the layer has as many rows as a part, and no mask vectors, or vectors of another row.
        RuntimeError: the vectors were cut to the part (a device-side check).
    """
    split = _active
    if split is None or length != split.rows.shape[1]:
        return None
    if vectors is None:
        raise ValueError(
            f"a layer has {length} rows, as many as a part of a row that is split over processes, but no {VECTORS}, "
            "without which it would attend within its part alone; pass those of the whole row to the model"
        )
    if not isinstance(vectors, Tensor) or vectors.dim() != 4:
        return None  # which the layer refuses
    if vectors.shape[2] == length:  # a whole row, unless its vectors name rows that it has not
        device_assert(
            (vectors <= length).all(),
            f"{VECTORS} of {length} tokens name rows past {length}, as if cut to a part of a row that is split over "
            f"processes; pass those of the whole row of {split.length} tokens, as RowSplit.shard does",
        )
        return None
    if vectors.shape[2] != split.length:
        raise ValueError(
            f"{VECTORS} must be those of the whole row of {split.length} tokens, [B, 1, {split.length}, n], in the "
            f"context of sequence_parallel, got {list(vectors.shape)}"
        )
    return split


def refuse_rope_by_length(config: Any) -> None:
    """Raise a ValueError for rotary positions whose frequencies depend on the longest position of a call.

    transformers reads it from the positions of a part, so that processes would turn their tokens by other frequencies.

    Args:
        config: a text model's config, whose `rope_parameters` may be those of each type of layer; None passes.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for kind in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        rope_type = kind.get("rope_type") or ""
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"rope_type={rope_type!r} chooses the frequencies of rotary positions by the longest position of a "
                "call, which differs between the parts of a row that is split over processes; leave each row in one "
                "process (cp_size at 1), or take a model with another rope_type"
            )


def make_split(process_group: ProcessGroup, rows: Tensor, position_ids: Tensor, exchange: Any = None) -> RowSplit:
    """Return the split that `sequence_parallel` runs, with its arguments and errors."""
    group = group_of(process_group)
    for name, value in (("rows", rows), ("position_ids", position_ids)):
        if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be an integer tensor, got {got}")
    if exchange is not None and exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES} or None, got {exchange!r}")
    if rows.dim() != 2 or rows.shape[0] != group.size:
        raise ValueError(f"rows must have shape [{group.size}, S / {group.size}], got {list(rows.shape)}")
    if position_ids.dim() != 2 or position_ids.shape[1] != rows.numel():
        raise ValueError(
            f"position_ids must be those of the whole row, [B, {rows.numel()}], got {list(position_ids.shape)}"
        )
    order = rows.flatten()
    natural = torch.arange(rows.numel(), device=rows.device)
    places = order.argsort()
    if not torch.equal(order[places], natural) or not bool((rows.diff() > 0).all()):
        raise ValueError(f"rows must hold each of 0..{rows.numel() - 1} once, ascending in each process's part")
    if torch.equal(order, natural):
        return RowSplit(group, process_group, rows, position_ids, exchange, None, None)
    return RowSplit(group, process_group, rows, position_ids, exchange, order, places)
