"""Training on rows of hundreds of thousands of tokens on one GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashmask_hf.long_rows.checkpointing import keep_attention

if TYPE_CHECKING:
    from flashmask_hf.long_rows.offload import offload_checkpoints
    from flashmask_hf.long_rows.tiling import tile_tokens

__all__ = ["keep_attention", "offload_checkpoints", "tile_tokens"]


def __getattr__(name: str) -> Any:
    """Import modules that import TorchDynamo, which is slow, on first use."""
    modules = {"offload_checkpoints": "offload", "tile_tokens": "tiling"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)
