"""Plugin of ms-swift, which runs this file (`--external_plugins`) before it checks its arguments.

ms-swift puts this folder first in `sys.path`, so the file is alone in it, under a name that hides no module.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from swift.arguments import SftArguments  # pyright: ignore[reportMissingImports]

from flashmask_hf.integrations import refuse_ranks, share_if
from flashmask_hf.names import FLASHMASK

_check, _load = SftArguments._check_padding_free, SftArguments.get_model_processor


def _check_padding_free(arguments: Any) -> None:
    """Check packing as for FlashAttention, which reads the same flat rows."""
    if arguments.attn_impl != FLASHMASK:
        return _check(arguments)
    refuse_ranks("sequence_parallel_size", arguments.sequence_parallel_size)
    with mock.patch.object(arguments, "attn_impl", "flash_attention_2"):
        _check(arguments)


def _get_model_processor(arguments: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a model, and share prefixes if `--model_kwargs '{"flashmask_share_prefixes": 1}'` asks for it."""
    model, processor = _load(arguments, *args, **kwargs)
    if model is not None:
        share_if(os.environ.get("FLASHMASK_SHARE_PREFIXES"), model)
    return model, processor


SftArguments._check_padding_free = _check_padding_free
SftArguments.get_model_processor = _get_model_processor
