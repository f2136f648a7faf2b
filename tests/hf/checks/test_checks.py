"""The list of checks and their messages."""

import pytest
import torch
from tools.model_pairs import model_pair, positions, tokens

from flashmask_hf import masks
from flashmask_hf.hf.call import Call
from flashmask_hf.hf.checks import CHECKS


def test_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_messages_have_at_most_200_characters(check):
    named = dict(input_ids=tokens(1, 9), position_ids=positions([9]), labels=tokens(1, 9))
    named |= dict(startend_row_indices=masks.causal(9).indices, cu_seq_lens_q=torch.tensor([[0, 4, 9]]))
    call = Call(model_pair("llama")[0], (), named)
    call.state.first_position = 2
    assert len(check.message(call)) <= 200
