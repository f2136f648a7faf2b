"""Case of `tests/trainers/test_liger.py`: Liger's kernels on rows split over two processes, against none on one."""

from __future__ import annotations

from typing import Any

import pytest
from tools.context_parallel_cases import outcome, trainer_of
from tools.liger import KERNELS, interpret_liger
from tools.parallel_cases import model_of


def liger(group: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        programs = interpret_liger(patch)
        options = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
        model = model_of("llama", 8, 4, layers=1)
        trainer = trainer_of(group, "liger", model, use_liger_kernel=group.size() > 1, **options)
        trainer.train()
        return outcome(trainer, group, "liger") | {"kernels": set(KERNELS) <= programs.keys()}


CASES = {"liger": liger}
