"""The list of checks; `tests/test_messages.py` reads their messages."""

from flashmask_hf.hf.checks import CHECKS


def test_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
