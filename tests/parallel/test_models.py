"""Rows split over 2 and 4 processes: losses, gradients and refusals, in one launch of `tools.parallel_cases`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tools import parallel_cases
from tools.processes import each_case, left_out, result, run_cases
from tools.tiny import EXACT

SIZES = (2, 4)
COMPARED = [
    (size, name)
    for name in sorted(
        set(parallel_cases.CASES)
        - {"whole rows", "refusals", "other batches", "tensor parallel refusals", "no positions"}
    )
    for size in parallel_cases.GROUPS.get(name, SIZES)
]


FULL = {"compiled"} | {
    f"{name}-4"
    for name in (
        "documents",
        "exchange of heads",
        "exchange of keys",
        "tensor parallel",
        "checkpointing",
    )
}
assert {*parallel_cases.CASES} | {f"{name}-{size}" for name in parallel_cases.CASES for size in SIZES} >= FULL


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, run_folder: Path) -> dict[int, dict[str, Any]]:
    return run_cases(run_folder, "tools.parallel_cases", SIZES, left_out(request, FULL))


@pytest.mark.parametrize(("size", "name"), each_case(COMPARED, FULL))
def test_loss_and_gradients_are_those_of_one_process(found, size, name):
    got = result(found, size, name)
    assert got["loss"] < EXACT
    assert got["gradients"] < EXACT
    assert got.get("graphs", 1) == 1


@pytest.mark.parametrize("size", SIZES)
def test_whole_rows_and_generation_run_in_the_context_as_without(found, size):
    assert result(found, size, "whole rows")["equal"]


@pytest.mark.parametrize("size", SIZES)
def test_a_batch_without_positions_gets_those_of_the_split(found, size):
    assert result(found, size, "no positions")["equal"]


REFUSED = {
    "no context": "ValueError: .*whole row of 128 tokens, but this layer has .*context of .*sequence_parallel",
    "rotary positions": "ValueError: rope_type='dynamic' depends on the longest position .*leave each row on one rank",
    "no vectors": "ValueError: a layer has .*as many as a shard.*no startend_row_indices",
    "vectors of another row": r"ValueError: .*whole split row, \[B, 1, 128, n\], got \[2, 1, 120, 1\]",
    "vectors of a part": "RuntimeError: startend_row_indices of .*pass .*of the whole row of 128 tokens",
    "no positions": r"RuntimeError: position_ids of a shard are missing, .*split\.shard",
    "other positions": "ValueError: position_ids of batch and sequence_parallel differ; pass the batch's to both",
    "positions of more rows": "ValueError: position_ids of batch and sequence_parallel differ",
    "vectors out of range": r"RuntimeError: startend_row_indices must lie in 0\.\.128",
    "vectors below 0": r"RuntimeError: startend_row_indices must lie in 0\.\.128",
    "rows of dropout": "RuntimeError: attention dropout needs rows split over processes in blocks of 16; set pad_to",
    "cache": "ValueError: a layer has .* rows of a row that is split over processes, but .* keys; pass use_cache=False",
    "heads of vectors": "NotImplementedError: startend_row_indices per head .*pass exchange='keys' to",
    "no int32": "TypeError: startend_row_indices must be an int32 tensor",
    "2D mask": "RuntimeError: a 2D attention_mask hides tokens of a row that is split",
    "dense mask": "ValueError: attention_mask must be None, a FlashMask or .*got torch.bool",
    "labels without a shift": "ValueError: labels cover .*a shard of the row.*pass shift_labels",
    "key": "ValueError: the batch has 'attention_mask', which cannot be split",
    "length": r"ValueError: input_ids must have shape \[B, 128\].*got \[2, 127\]",
    "no vectors in the batch": "ValueError: startend_row_indices is missing",
    "exchange": r"ValueError: exchange must be one of \('heads', 'keys'\) or None, got 'rows'",
    "parts": r"ValueError: rows must have shape \[\d, S / \d\], got \[1, ",
    "rows twice": r"ValueError: rows must hold each of 0\.\.127 once",
    "descending": r"ValueError: rows must hold each of 0\.\.127 once, ascending",
    "float rows": "TypeError: rows must be an integer tensor .* got torch.float32",
    "positions": r"ValueError: position_ids must have the whole row, \[B, 128\], got \[2, 127\]",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("size", SIZES)
def test_wrong_calls_are_refused(found, size, name):
    assert re.match(REFUSED[name], result(found, size, "refusals")[name])


@pytest.mark.parametrize("size", SIZES)
def test_processes_with_different_batches_are_refused(found, size):
    outcome = result(found, size, "other batches")
    for name in ("tokens", "vectors"):
        messages = outcome[name]
        assert len(messages) == size
        assert all(x.startswith("ValueError: the ranks of the group have different batches") for x in messages)
    assert outcome["comparisons"] == 1


def test_heads_that_do_not_divide_are_refused_if_asked_for(found):
    message = result(found, 4, "refusals")["6 heads"]
    assert message.startswith("ValueError: exchange='heads' needs 4 ranks to divide the 6 query heads")


@pytest.mark.parametrize("name", ["local", "whole", "keys", "heads"])
def test_vectors_per_head_are_refused_under_tensor_parallelism(found, name):
    message = r"computes 4 of 8 query heads, as under tensor parallelism; pass mask indices"
    message = r"exchange heads; pass exchange='keys'" if name == "heads" else message
    assert re.match(rf"NotImplementedError: .*{message}", result(found, 2, "tensor parallel refusals")[name])
