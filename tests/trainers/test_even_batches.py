"""Streams and evaluations on several processes: as many batches in each, and every learned token counts once."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from tools.documents import SAME
from tools.even_batches_cases import CASES
from tools.processes import result, run_cases
from tools.support import rounding
from tools.tiny import FUSED_HEAD, TRAINER_WARNINGS
from torch.utils.data import BatchSampler

from flashmask_hf.names import IGNORED
from flashmask_hf.trainers import PackedSFTTrainer, even_batches
from flashmask_hf.trainers.even_batches import EvenBatchesMixin

pytestmark = TRAINER_WARNINGS

BOUND = rounding(1000)  # sums of two layers, forward and backward, and of the labels of a step


@pytest.fixture(scope="module")
def found(run_folder: Path) -> dict[int, dict[str, Any]]:
    return run_cases(run_folder, "tools.even_batches_cases", (1, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("train")])
def test_a_stream_trains_on_several_processes(found, name):
    assert result(found, 2, name)["steps"] == result(found, 1, name)["steps"] == 16


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("evaluate")])
def test_evaluation_on_several_processes_reads_every_row_once(found, name):
    want, got = result(found, 1, name), result(found, 2, name)
    for key in ("loss", "entropy", "mean_token_accuracy"):
        assert got[key] == pytest.approx(want[key], rel=BOUND)


@pytest.mark.full
def test_each_row_is_predicted_once(found):
    want, got = result(found, 1, "predicted"), result(found, 2, "predicted")
    assert got["sums"] == pytest.approx(want["sums"], rel=BOUND)


@pytest.mark.full
@pytest.mark.parametrize(("name", "evaluations"), [("weighed", 0), ("weighed pairs", 1)])
def test_weights_are_divided_by_the_sum_of_all_processes(found, name, evaluations):
    want, got = result(found, 1, name), result(found, 2, name)
    assert [len(want.get(key, [])) for key in ("loss", "grad_norm", "eval_loss")] == [3, 3, evaluations]
    for key in want.keys() - {"seconds"}:
        assert got[key] == pytest.approx(want[key], rel=BOUND)


@pytest.mark.full
@pytest.mark.parametrize(("name", "metric"), [("dpo", "eval_rewards/margins"), ("reward", "eval_margin")])
def test_a_stream_of_pairs_trains_on_several_processes_and_evaluates_each_once(found, name, metric):
    want, got = result(found, 1, name), result(found, 2, name)
    assert got["logged"] == [6, 2]
    for one, several in zip(want["means"], got["means"], strict=True):
        assert metric in one
        assert several == pytest.approx(one, rel=BOUND, abs=BOUND)


@FUSED_HEAD
@pytest.mark.full
def test_diffusion_on_several_processes_divides_by_all_labels(found):
    want, got = result(found, 1, "diffusion"), result(found, 2, "diffusion")
    for name, values in want.items():
        if name != "seconds":
            assert got[name] == pytest.approx(values, rel=BOUND), name


@pytest.mark.full
def test_shared_prefixes_on_two_processes_are_stock(found):
    want, got = result(found, 1, "prefixes"), result(found, 2, "prefixes")
    assert (want["rows"], got["rows"]) == (16, 4)
    for key in SAME:
        assert got[key] == pytest.approx(want[key], rel=BOUND), key


class Stock:
    """Trainer's part of what the mixin extends."""

    _copies = 1
    args = SimpleNamespace(eval_use_gather_object=False, batch_eval_metrics=False)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, Any]:
        return list(epoch_iterator), None

    def _get_dataloader(self, dataset: Any, is_training: bool = False) -> Any:
        sampler = BatchSamplerShard(BatchSampler(range(5), 2, drop_last=False), 2, 0)
        return SimpleNamespace(dataset=dataset, batch_sampler=sampler)


class OneOfTwo(EvenBatchesMixin, Stock):
    """A trainer of the first of two processes, which are simulated; the second has `others` batches for each step."""

    def __init__(self, others: list[int] | None = None):
        counts = iter(others or [])
        self.train_dataset = IterableDataset.from_generator(lambda: iter([]))
        self.accelerator = SimpleNamespace(
            num_processes=2, process_index=0, device="cpu",
            gather=lambda x: torch.stack([x, torch.tensor(next(counts))]),
        )  # fmt: skip


def test_an_epoch_ends_with_the_process_that_has_the_fewest_batches():
    trainer, batches = OneOfTwo(others=[2, 1, 2]), iter(range(9))
    trainer.accelerator.gather = partial(even_batches._gather_unequal, trainer.accelerator.gather)  # as for a stream
    steps = [trainer.get_batch_samples(batches, 2, "cpu")[0] for _ in range(3)]
    assert steps == [[0, 1], [], []]
    assert next(batches) == 4  # once the stream has ended in a process, the others read no further
    assert trainer.get_batch_samples(iter(range(2)), 2, "cpu")[0] == [0, 1]  # of the next epoch


def test_a_gather_of_unequal_batches_leaves_copies_out(monkeypatch):
    def gather(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x, *[torch.tensor([1] if x.dtype == torch.int64 else [7.0, 0.0])] * 2])

    trainer: Any = OneOfTwo()
    trainer._copies, state = 2, SimpleNamespace(end_of_dataloader=True, remainder=-1)  # the end of a stream
    own = {"num_processes": 4, "gather": gather, "gather_for_metrics": None, "gradient_state": state}
    trainer.accelerator = SimpleNamespace(**own)
    trainer._gather_evaluations(parts=1)
    gathered = trainer.accelerator.gather_for_metrics
    assert gathered({"loss": torch.tensor([5.0, 6.0])})["loss"].tolist() == [5.0, 6.0, 7.0]
    trainer._found = [False, False, True, True]
    assert gathered(torch.tensor([5.0, 6.0])).tolist() == [7.0]
    monkeypatch.setattr(even_batches, "gather_object", lambda own: [*own, *own, ["c"], ["d"]])
    assert gathered("ab") == gathered(["a", "b"], use_gather_object=True) == ["c"]
    trainer._found, state.remainder = None, 2
    assert gathered("ab") == ["a", "b"]
    trainer.args = SimpleNamespace(batch_eval_metrics=True)
    with pytest.raises(ValueError, match=r"^batch_eval_metrics=True needs one process"):
        trainer._gather_evaluations(parts=1)


def test_a_gather_takes_no_rows_and_no_other_type():
    both = partial(even_batches._gather_unequal, lambda x: torch.cat([x, x]))
    assert both([torch.ones(0, 3)])[0].shape == (0, 3)
    with pytest.raises(TypeError, match="Unsupported types"):
        both([1])


@pytest.mark.parametrize("training", [False, True])
def test_first_rows_fill_the_last_batch_only_in_training(training):
    assert OneOfTwo()._get_dataloader([1], is_training=training).batch_sampler.even_batches is training


def test_ranks_that_share_rows_must_read_the_same_rows_of_a_stream():
    trainer: Any = OneOfTwo(others=[1])
    trainer._copies = 2
    stream = IterableDataset.from_generator(lambda: iter([]))
    assert trainer._get_dataloader(stream).dataset is stream  # only one group
    with pytest.raises(ValueError, match="must have split 0 of 1 of a stream, got 0 of 2; leave split_dataset_by_node"):
        trainer._get_dataloader(split_dataset_by_node(stream, 0, 2))
    with pytest.raises(ValueError, match="must read as many batches of a stream, got 1 and 2; give each the same"):
        trainer.get_batch_samples(iter(range(2)), 2, "cpu")


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split by the caller"])
def test_each_row_of_a_stream_is_read_in_one_process(split):
    stream = IterableDataset.from_generator(lambda: ({"row": i} for i in range(6)))
    if split:
        stream = split_dataset_by_node(stream, 0, 2)
    dealt = OneOfTwo()._get_dataloader(stream).dataset
    assert dealt.n_shards >= 2
    found = [[row["row"] for row in copy.copy(dealt).shard(2, i)] for i in range(2)]
    assert found == ([[0, 2, 4]] * 2 if split else [[0, 2, 4], [1, 3, 5]])


def test_an_idle_batch_has_no_labels():
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])}
    idle = PackedSFTTrainer._idle_batch(object.__new__(PackedSFTTrainer), batch)
    assert idle["labels"].tolist() == [[IGNORED] * 3]
    assert idle["input_ids"] is batch["input_ids"]


class Batches(tuple[str, ...]):
    """A loader with some batches."""

    dataset = None


def evaluated(batches: tuple[str, ...], others: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list]:
    """Return the batches that the first of two processes evaluates, and what it was sent: batch and sender."""
    sent: list[tuple[Any, int]] = []

    def broadcast(batches: list[Any], from_process: int) -> list[Any]:
        sent.append((batches[0], from_process))
        return batches if from_process == 0 else ["other"]

    monkeypatch.setattr(even_batches, "broadcast_object_list", broadcast)
    monkeypatch.setattr(even_batches, "send_to_device", lambda batch, device: batch)
    trainer: Any = OneOfTwo(others)
    trainer._idle_batch = lambda batch: f"idle {batch}"
    return list(even_batches._EvenBatches(Batches(batches), trainer)), sent


def test_a_process_without_rows_takes_idle_batches_until_all_have_evaluated_theirs(monkeypatch):
    batches, sent = evaluated(("first",), [1, 1, 1, 0], monkeypatch)
    assert batches == ["first", "idle first", "idle idle first"]
    assert sent == []


def test_a_process_without_any_rows_takes_the_form_of_another_process_s_batch(monkeypatch):
    batches, sent = evaluated((), [1, 0], monkeypatch)
    assert batches == ["idle other"]
    assert sent == [(None, 1)]


def test_a_process_sends_the_form_of_its_first_batch_to_a_process_without_any_rows(monkeypatch):
    batches, sent = evaluated(("first", "second"), [0, 0, 0], monkeypatch)
    assert batches == ["first", "second"]
    assert sent == [("first", 0)]
