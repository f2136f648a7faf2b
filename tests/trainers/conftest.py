"""Fixtures of the tests of trainers; modules of other models and templates have their own of these names."""

from typing import Any

import pytest
from tools.rewards import reward_tokenizer, save_reward_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return the word tokenizer with a chat template."""
    return reward_tokenizer()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a reward model."""
    return save_reward_model(tmp_path_factory.mktemp("model"))
