"""Run a model call: rewrite, check, run, check again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashmask_hf.hf.call import Call, current_calls
from flashmask_hf.hf.checks import run_checks
from flashmask_hf.hf.rewrites import rewrite
from flashmask_hf.mask import FlashMask
from flashmask_hf.names import HASH, NAMES, QK, VECTORS
from flashmask_hf.sparse.hf import warn_of_unread_options

__all__ = ["run_call"]


def run_call(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a transformers model by its unbound `__call__`; raise if it mixes the documents of a row.

    Calls with another attention than this package's and without mask indices run as they are.

    Raises:
        Exception: an error of `CHECKS`; or what the model raises.
    """
    config = model.config
    if getattr(config, HASH, None) is not None or getattr(config, QK, None) is not None:
        warn_of_unread_options(model)
    is_another = config._attn_implementation not in NAMES and kwargs.get(VECTORS) is None
    if is_another and not any(isinstance(x, FlashMask) for x in (*args, kwargs.get("attention_mask"))):
        return original(model, *args, **kwargs)
    calls = current_calls()
    call = rewrite(Call(model, args, kwargs, calls.call))
    run_checks(call)
    calls.call = call
    try:
        output = original(model, *call.args, **call.kwargs)
    finally:
        calls.call = call.outer
    run_checks(call, after=True)
    if call.outer is not None:
        call.outer.reads += call.reads
        if call.indices is not None:  # else its layers received no mask indices
            call.outer.supplied += call.supplied
    return output
