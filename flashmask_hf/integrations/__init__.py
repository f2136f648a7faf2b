"""Plugins of other programs, each imported by its program alone."""

from __future__ import annotations

from typing import Any

from flashmask_hf.hf.models import unwrap_peft
from flashmask_hf.names import FLASHMASK
from flashmask_hf.sharing import share_prefixes


def refuse_ranks(setting: str, size: int | None) -> None:
    """Raise a ValueError if a program's setting splits rows over ranks."""
    if (size or 1) > 1:
        raise ValueError(
            f"{setting} must be 1 with attention 'flashmask', got {size}: the program exchanges tokens inside its own "
            "attention. Set it to 1, or use PackedSFTTrainer with cp_size"
        )


def share_if(asked: Any, model: Any) -> None:
    """Share prefixes in a model of attention "flashmask" if a program's setting asks for it: True, or "1" or "true"."""
    if str(asked).lower() in ("1", "true") and unwrap_peft(model).config._attn_implementation == FLASHMASK:
        share_prefixes(model)
