"""Plugin of verl, which loads the entry points of the group `verl.plugins` when it is imported, in every process.

It registers "flashmask". Its engine of FSDP calls `apply_monkey_patch` for every model that it has made.
"""

from __future__ import annotations

import functools
from typing import Any

from verl.models.transformers import monkey_patch  # pyright: ignore[reportMissingImports]

from flashmask_hf.integrations import refuse_ranks, share_if
from flashmask_hf.names import FLASHMASK

_apply = monkey_patch.apply_monkey_patch


@functools.wraps(_apply)
def _apply_monkey_patch(model: Any, ulysses_sp_size: int = 1, *args: Any, **kwargs: Any) -> Any:
    config = vars(model.config)
    if model.config._attn_implementation == FLASHMASK:
        refuse_ranks("ulysses_sequence_parallel_size", ulysses_sp_size)
        config.pop("attn_implementation", None)  # of override_config; checkpoints would hold it, and load nowhere else
    result = _apply(model, ulysses_sp_size, *args, **kwargs)
    share_if(config.pop("flashmask_share_prefixes", False), model)
    return result


monkey_patch.apply_monkey_patch = _apply_monkey_patch
