"""Documents found in positions, next to hidden tokens too."""

import pytest
import torch
from tools.model_pairs import model_pair

from flashmask_hf.hf.call import Call
from flashmask_hf.hf.documents import document_starts, of_positions


def starts(positions, hidden=()):
    real = torch.tensor([[i not in hidden for i in range(len(positions))]])
    return document_starts(torch.tensor([positions]), real)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("positions", "hidden", "expected"),
    [
        ([0, 1, 2, 0, 1, 2], (), [0, 3]),
        ([0, 1, 2, 0, 1, 2], (3,), [0, 4]),
        ([0, 1, 2, 0, 1, 2], (2, 3), [0, 4]),
        ([0, 1, 0, 1, 2, 3], (2, 3), [0, 4]),
        ([0, 1, 2, 1, 1, 2], (3,), [0, 4]),
        ([0, 1, 2, 1, 0, 1], (3,), [0, 4]),
        ([0, 1, 2, 1, 2, 3], (5,), [0]),
        ([0, 1, 2, 0, 0, 3], (3, 4), [0]),
        ([0, 1, 2, 1, 1, 3], (3, 4), [0]),
        ([0, 1, 2, 3, 4, 5], (2, 3), [0]),
        ([0, 0, 1, 2, 0, 0], (0, 4, 5), [1]),
        ([0, 1, 2, 3, 0, 1], (0, 1), [2, 4]),
        ([0, 1, 2, 3, 4, 5], (1,), [0]),
        ([0, 1, 5, 1, 2, 3], (2,), [0, 3]),
        ([0, 0, 0, 1, 2, 3], (1,), [0, 2]),
        ([0, 0, 0, 0, 0, 0], (1,), []),
        ([0, 0, 1, 2, 3, 4], (1, 2), [0, 3]),
        ([0, 1, 2, 3, 4, 5], (0,), [1]),
        ([5, 1, 2, 3, 4, 5], (0,), []),
        ([3, 1, 2, 3, 4, 5], (1,), [2]),
    ],
    ids=str,
)
def test_documents_start_next_to_hidden_tokens(positions, hidden, expected):
    assert starts(positions, hidden) == expected


def test_a_gap_that_may_be_a_document_is_refused():
    with pytest.raises(RuntimeError, match=r"0, 0, 1 around a token that the 2D mask hides.*count through"):
        starts([0, 0, 0, 1, 2, 3], hidden=(1, 2))
    with pytest.raises(RuntimeError, match="one document with a gap, or two"):
        starts([3, 0, 0, 1, 2, 3], hidden=(2,))
    assert starts([0, 1, 2, 0, 1, 2], hidden=(1, 2, 3)) == [0, 4]  # the hidden tokens are not filled with 0


def test_one_row_of_positions_serves_every_padding():
    real = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 1, 1, 1]]).bool()
    got = document_starts(torch.tensor([[0, 1, 2, 0, 1]]), real)
    assert got.int().tolist() == [[1, 0, 0, 0, 1], [1, 0, 0, 1, 0]]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, False),
        ([[1, 1, 1, 1, 1]], False),
        ([[0, 0, 1, 1, 1]], True),
        ([[0, 0, 1]], False),
        ([[[0, 0, 1, 1, 1]] * 5], False),
        ([[1, 1, 0, 0, 1, 1, 1]], True),  # of two tokens in a cache, too
    ],
)
def test_hidden_tokens_start_no_document(mask, expected):
    given = dict(input_ids=torch.ones(1, 5), position_ids=torch.tensor([[0, 0, 0, 1, 2]]))
    given["attention_mask"] = None if mask is None else torch.tensor(mask)
    documents = Call(model_pair("llama")[0], (), given).documents
    assert bool(documents.is_one_per_row()) is expected


def test_a_document_whose_first_token_is_hidden_counts():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert not of_positions(positions, torch.tensor([[1, 1, 1, 0, 1, 1]]).bool()).is_one_per_row()
    assert of_positions(positions, torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()).is_one_per_row()
