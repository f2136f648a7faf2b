"""Cases of `test_sharing.py`: trainers of TRL share prefixes under DDP and FSDP2, in a group of 1 without either."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_sharing import make_trainer
from tools.context_parallel_cases import norms_of, use_fsdp_on_cpu
from tools.tiny import keep_float64

import flashmask_hf
from flashmask_hf.sharing import _pack


def trained(name: str, sharded: bool) -> Any:
    """Return a case that trains all weights, or an adapter by DPO. The group of 1 runs first, and saves the model."""

    def case(group: Any) -> dict[str, Any]:
        size, folder = group.size(), Path(os.environ["CASES_FOLDER"], name)
        options = {"per_device_train_batch_size": 4 // size, "use_cpu": size == 1 or not sharded}
        with pytest.MonkeyPatch.context() as patch:
            keep_float64(patch)
            if sharded and size > 1:
                use_fsdp_on_cpu()
            trainer = make_trainer(name, name == "dpo", folder, dataloader_pin_memory=False, **options)
            for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
                flashmask_hf.share_prefixes(model)
            _pack.cache_clear()
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert _pack.cache_info().misses, "no prefix was shared"
        wrapper = type(trainer.model_wrapped).__name__
        return {"losses": losses, "norms": norms_of(trainer.model), "wrapper": wrapper}

    return case


CASES = {
    f"{name} {way}": trained(name, way == "fsdp2") for way in ("ddp", "fsdp2") for name in ("orpo", "kto", "dpo")
}  # FSDP2 last: its settings stay
