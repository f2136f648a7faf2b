"""The list of checks, its messages and its table in the documentation."""

import runpy
from pathlib import Path

import pytest
import torch
from tools.model_pairs import model_pair, positions, tokens

from flashmask_hf import masks
from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks import CHECKS

DOCS = Path(__file__).parents[3] / "docs"


def test_the_documented_checks_are_the_list():
    """`python docs/wrong_setups.py` writes the table."""
    text = (DOCS / "wrong_setups.md").read_text()
    assert runpy.run_path(str(DOCS / "wrong_setups.py"))["page"](text) == text
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_messages_have_at_most_200_characters(check):
    named = dict(input_ids=tokens(1, 9), position_ids=positions([9]), labels=tokens(1, 9))
    named |= dict(startend_row_indices=masks.causal(9).indices, cu_seq_lens_q=torch.tensor([[0, 4, 9]]))
    call = Call(model_pair("llama")[0], (), named)
    call.state.first_position = 2
    assert len(check.message(call)) <= 200
