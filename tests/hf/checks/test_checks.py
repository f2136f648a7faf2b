"""The list of checks; `tests/test_messages.py` reads their messages."""

import pytest
from tools.model_pairs import model_pair, tokens

from flashmask_hf import masks
from flashmask_hf.hf.checks import CHECKS


def test_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_other_checks_apply_after_a_change_of_attention():
    """Those that can apply are known from the first call with arguments of these names."""
    model, _ = model_pair("llama")
    row = dict(input_ids=tokens(1, 6), startend_row_indices=masks.causal_document([3, 3]).indices, use_cache=False)
    model(**row)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="attn_implementation='sdpa' ignores them"):
        model(**row)
    model.set_attn_implementation("flashmask")
    model(**row)
