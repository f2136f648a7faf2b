"""Rows of questions with answers, split over ranks: the model's outputs of the whole batch on every rank.

A rank computes the outputs of the answers' tokens that its shard predicts. They take their places among zeros, which
the ranks sum, with gradients. So losses and metrics read whole batches. Each rank's loss is the group's: the
backward of the sum adds N equal gradients, and FSDP averages over the N ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmask_hf.names import IGNORED, PACKED_INDEX, PACKED_KEYS, VECTORS
from flashmask_hf.parallel.collectives import all_sum
from flashmask_hf.parallel.split import RowSplit, run_split
from flashmask_hf.trainers.context_parallel import ContextParallelMixin, refuse

_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "logits")
"""Outputs per label of TRL's fused head, and the rewards of a reward model."""


class SplitAnswersMixin(ContextParallelMixin):
    """Mixin of a TRL trainer on batches of `PackedRows.indexed_batch`, whose rows may be split over the cp mesh."""

    _shards_inputs = False

    def _start_context_parallel(self, size: int) -> None:
        refuse(size > 1 and self.args.use_liger_kernel, "use_liger_kernel is not tested on split rows; leave it out")
        super()._start_context_parallel(size)

    def _on_shards(self, model: Any) -> Any:
        """Return a model that takes whole batches, on every rank of the cp mesh the same."""
        return model if self._cp_size == 1 else _SplitModel(model, self)


class _SplitModel:
    """Model that computes a batch's rows split over ranks, and returns the outputs of the whole batch."""

    def __init__(self, model: Any, trainer: SplitAnswersMixin):
        self._model, self._trainer, self.training = model, trainer, model.training

    def __call__(self, *, labels: Tensor | None = None, attention_mask: Any = None, **inputs: Any) -> Any:
        """Return the model's output, with `_OUTPUTS` of the whole batch, [N, L - 1] for labels [N, L].

        Without labels, outputs are per entry of `packed_index`.
        """
        rows = {name: inputs.pop(key) for name, key in PACKED_KEYS.items()}
        split = self._trainer._split_of(rows[VECTORS], rows["position_ids"])
        part = split.shard(rows)
        index = inputs.pop(PACKED_INDEX)
        if labels is not None:  # the token before a label predicts it
            index, labels = index[:, :-1], labels[:, 1:]
        entries, places = _own_entries(split, index, labels)
        places = nn.functional.pad(places, (0, 1))  # a rank may have no entry, but each runs the head
        if labels is not None:
            own = nn.functional.pad(labels.flatten()[entries], (0, 1), value=IGNORED)
            inputs |= {"shift_labels": own[None], PACKED_INDEX: places[None]}
        else:
            inputs[PACKED_INDEX] = places[:, None]
        packed = {PACKED_KEYS[name]: x for name, x in part.items()}
        with run_split(split):
            output = self._model(**inputs | {"input_ids": inputs[PACKED_INDEX]} | packed)  # the head reads no ids
        found = {name: output[name] for name in _OUTPUTS if output.get(name) is not None}
        values = torch.stack([x.flatten()[:-1].float() for x in found.values()])
        whole = values.new_zeros(len(values), index.numel()).index_copy(1, entries, values)
        for (name, own), x in zip(found.items(), all_sum(whole, split.group), strict=True):
            setattr(output, name, x.view(index.shape).to(own.dtype))
        return output


def _own_entries(split: RowSplit, index: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the flat entries of an index whose tokens this rank has, int64 [m], and their places in its rows.

    Args:
        split: of rows [R, S], whose shards are [R, S / N].
        index: int64 [N, L], indices in the flattened rows.
        labels: int64 [N, L], to leave entries without a label out.
    """
    row, token = index.flatten() // split.length, index.flatten() % split.length
    place = token if split.places is None else split.places[token]
    size = split.own_rows.numel()
    own = place // size == split.group.rank
    if labels is not None:
        own &= labels.flatten() != IGNORED
    entries = own.nonzero()[:, 0]  # the host waits
    return entries, (row * size + place % size)[entries]
