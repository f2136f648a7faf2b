"""Plugin of axolotl, which imports it by name (`plugins:`) and registers it before it validates a config."""

from __future__ import annotations

from typing import Any

import axolotl.utils.schemas.config as schema  # pyright: ignore[reportMissingImports]
from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from flashmask_hf.integrations import refuse_ranks, share_if
from flashmask_hf.names import FLASHMASK


class FlashMaskArgs(BaseModel):
    """Options of the plugin in axolotl's config."""

    flashmask_share_prefixes: bool = False


class FlashMaskPlugin(BasePlugin):
    """Accept `attn_implementation: flashmask`, with sample packing."""

    def get_input_args(self) -> str:
        """Return the name of the class of options."""
        return f"{__name__}.FlashMaskArgs"

    def register(self, cfg: Any) -> None:
        """Add the name to axolotl's sets of attention.

        Raises:
            ValueError: rows are split over ranks.
        """
        if cfg.get("attn_implementation") == FLASHMASK:
            for setting in ("context_parallel_size", "sequence_parallel_degree"):
                refuse_ranks(setting, cfg.get(setting))
        schema.CANONICAL_ATTN_IMPLS |= {FLASHMASK}
        schema.ATTN_IMPLS_SUPPORTING_PACKING |= {FLASHMASK}

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Share prefixes if the config asks for it."""
        share_if(cfg.get("flashmask_share_prefixes"), model)
