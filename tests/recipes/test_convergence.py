"""The study of loss curves, for a few steps of each task: what it compares agrees, and what differs is said."""

import pytest
import torch
from tools.recipes import BENCHMARKS  # noqa: F401  # makes the benchmarks importable
from tools.tiny import TRAINER_WARNINGS

from flashmask_hf import masks
from flashmask_hf._call.plan_cache import plan_of

import convergence  # isort: skip
import packed_attention  # isort: skip

pytestmark = TRAINER_WARNINGS

BOUND = 1e-3  # of the difference of two losses over a few steps
STEPS = 4
CURVES = {"flashmask", "flashmask_again", "flashmask_unskipped", "sdpa"}


@pytest.mark.full
@pytest.mark.parametrize("task", convergence.TASKS)
def test_curves_agree(task, monkeypatch):
    few = convergence.dataset_of(task).select(range(40))
    monkeypatch.setattr(convergence, "dataset_of", lambda task: few)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows, _ = convergence.compare(task, 1, STEPS)
    curves = {name: [float(row[name]) for row in rows if row[name]] for name in convergence.CURVES}
    ran = {name: losses for name, losses in curves.items() if losses}
    assert set(ran) == CURVES | ({"trl"} if task in ("dpo", "reward") else set())
    assert {len(losses) for losses in ran.values()} == {STEPS}
    assert ran["flashmask"] == ran["flashmask_again"] == ran["flashmask_unskipped"]
    assert len(set(ran["flashmask"])) == STEPS
    for losses in ran.values():
        assert max(abs(a - b) for a, b in zip(losses, ran["flashmask"], strict=True)) < BOUND


def test_unskipped_lists_every_tile():
    def listed(name):
        with packed_attention.attention(name):
            return int(plan_of(masks.causal_document([200, 300, 140]), 640).counts.sum())

    assert listed("flashmask_unskipped") == 5 * 5
    assert listed("flashmask_portable") == listed("flashmask") < 15


def test_what_differs_is_a_fault():
    falling = [3.0, 2.0, 1.0]
    good = dict.fromkeys(("flashmask", "flashmask_again", "flashmask_unskipped", "sdpa", "trl"), falling)
    assert not list(convergence.faults_of(good, 3))
    other = [3.0, 2.0, 1.0000001]
    for name in ("flashmask_again", "flashmask_unskipped"):
        assert list(convergence.faults_of(good | {name: other}, 3)) == [f"{name} differs from flashmask from step 3 on"]
    assert not list(convergence.faults_of(good | {"sdpa": other, "trl": other}, 3))
    portable = good | {"flashmask_portable": other, "flashmask_unskipped": other}
    assert not list(convergence.faults_of(portable, 3))
    (fault,) = convergence.faults_of(portable | {"flashmask_unskipped": falling}, 3)
    assert fault == "flashmask_unskipped differs from flashmask_portable from step 3 on"
    (fault,) = convergence.faults_of(good | {"sdpa": [3.0, 2.0, 1.02]}, 3)
    assert fault == "sdpa differs from flashmask by up to 2.0e-02 in 50 steps, more than 0.001"
    long = {name: [3.0, *[1.0] * 60] for name in good}
    assert not list(convergence.faults_of(long | {"sdpa": [*long["sdpa"][:50], *[1.1] * 11]}, 61))
    (fault,) = convergence.faults_of(good | {"sdpa": [3.0, float("nan"), 1.0]}, 3)
    assert "sdpa differs from flashmask by up to nan" in fault
    (fault,) = convergence.faults_of(good | {"trl": [3.0]}, 3)
    assert fault == "trl has 1 steps, not 3"
    rising = {name: [1.0, 2.0, 1.0] for name in good}
    assert len(list(convergence.faults_of(rising, 3))) == len(good)
