"""Prefill each distinct prompt of a batch once, and generate from copies of its cache.

Hooks run the first forward, the prefill, on one row of each prompt, and repeat the logits and the cache for the others.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from flashmask_hf.hf.call import cache_of
from flashmask_hf.hf.models import unwrap_peft

_PER_ROW = ("input_ids", "attention_mask", "position_ids")
"""Keywords of a forward with a row per sequence; any other tensor keeps the prefill as it is."""


@contextlib.contextmanager
def shared_prefill(model: Any) -> Iterator[None]:
    """Make `generate` compute the prompts that a batch repeats once, within the context.

    Rows with equal tokens, attention mask and positions are one prompt. Random numbers stay the same, and logits differ
    only by the rounding of matrix products with fewer rows.

        with shared_prefill(model):
            model.generate(**batch, do_sample=True)

    The prefill stays as it is unless the cache is an empty `DynamicCache` that is not offloaded; in encoder-decoders,
    models without attention and RecurrentGemma; with images, other inputs of a row or embeddings; in compiled forwards;
    with activated LoRA; and with dropout in training. Of prompts in chunks, the first is shared.

    Args:
        model: a transformers model with `generate`, or a PEFT model around one, which may be wrapped for distributed
            training.
    """
    from accelerate.utils import extract_model_from_parallel  # wrapped models need accelerate

    model = extract_model_from_parallel(model, keep_torch_compile=False)
    adapters = getattr(model, "peft_config", {}).values()
    model = unwrap_peft(model)
    activated = any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters)  # it looks into each row
    parameters = inspect.signature(model.forward).parameters
    cached = "past_key_values" in parameters or "cache" in parameters  # some models ignore the cache they get
    elsewhere = model.config.is_encoder_decoder or model.config.model_type == "recurrent_gemma"  # states in its modules
    if activated or not cached or elsewhere:
        yield
        return
    copies: list[Tensor] = []  # for each row of the batch, its row in the running prefill

    def keep_distinct(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        copies.clear()
        if args or torch.compiler.is_compiling() or not _is_prefill(kwargs) or _draws_random_numbers(module):
            return None
        batch = len(kwargs["input_ids"])  # positions may have one row for all
        inputs = {name: x for name in _PER_ROW if (x := kwargs.get(name)) is not None and len(x) == batch}
        rows, row_of = _distinct_rows(list(inputs.values()))
        if len(rows) == batch:
            return None
        copies.append(row_of)
        return (), kwargs | {name: x[rows] for name, x in inputs.items()}

    def repeat(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not copies:
            return None
        row_of = copies.pop()
        cache_of(kwargs).reorder_cache(row_of)  # filled in place; not every output names it
        output.logits = output.logits[row_of.to(output.logits.device)]
        for name in ("hidden_states", "attentions"):  # all else that `generate` may read
            if output.get(name) is not None:
                output[name] = tuple(layer[row_of.to(layer.device)] for layer in output[name])
        return output

    hooks = [
        model.register_forward_pre_hook(keep_distinct, with_kwargs=True, prepend=True),
        model.register_forward_hook(repeat, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_prefill(kwargs: dict[str, Any]) -> bool:
    """Return whether a forward has exactly the keywords with which `generate` fills an empty cache."""
    cache = cache_of(kwargs)
    if type(cache) is not DynamicCache or cache.offloading or kwargs.get("return_dict") is not True:
        return False
    if cache.layers and not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return False  # recurrent layers alone do not know how many tokens they have seen
    inputs = {name: kwargs.get(name) for name in _PER_ROW}
    if inputs["input_ids"] is None or any(x is not None and x.dim() != 2 for x in inputs.values()):
        return False
    others = (x for name, x in kwargs.items() if name not in inputs and x is not cache)
    return cache.get_seq_length() == 0 and all(_is_of_no_row(x) for x in others)


def _is_of_no_row(value: Any) -> bool:
    """Return whether a keyword's value is a setting, or a dict without inputs, as for absent images."""
    values = value.values() if isinstance(value, dict) else (value,)
    return all(isinstance(x, (bool, int, float, str, type(None))) for x in values)


def _distinct_rows(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the index of the first row of each kind, and the kind of each row.

    Args:
        inputs: tensors [batch, length]. Rows are of one kind if they are equal in all of them.

    Returns:
        int64 [kinds] and int64 [batch], on the device of the inputs.
    """
    table = torch.cat([x.cpu().to(torch.int64) for x in inputs], dim=1)
    _, rows, row_of = np.unique(table.numpy(), axis=0, return_index=True, return_inverse=True)
    device = inputs[0].device
    return torch.from_numpy(rows).to(device), torch.from_numpy(row_of.reshape(-1)).to(device)


def _draws_random_numbers(model: nn.Module) -> bool:
    """Return whether a forward may draw random numbers.

    Modules in training mode do: dropout, jitter of routers, and NEFTune's noise.
    """
    settings = (item for part in model.modules() if part.training for item in vars(part).items())
    return any(
        isinstance(value, (int, float)) and value > 0 and (name == "p" or re.search("drop|jitter|noise", name))
        for name, value in settings
    )
