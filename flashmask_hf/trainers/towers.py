"""Image towers that every rank runs, also for rows without images."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashmask_hf.hf.call import cache_of
from flashmask_hf.hf.models import unwrap_peft

_FEATURES = ("pooler_output", "deepstack_features")
"""What a model reads of its tower's output."""


def run_tower_in_every_call(model: Any, processor: Any) -> None:
    """Make a model run its image tower on a blank image in calls without images, which changes no result.

    Calls that continue from a cache stay as they are.

    FSDP and ZeRO gather weights and reduce gradients in collectives, in which a rank without images would be missing.

    Args:
        model: a transformers model with `get_image_features`, or a PEFT model around one, not wrapped for distributed
            training.
        processor: its processor.
    """
    from PIL import Image

    core = unwrap_peft(model).base_model
    batch = processor.image_processor(images=[Image.new("RGB", (64, 64), "white")], return_tensors="pt")
    parameters = inspect.signature(core.get_image_features).parameters
    blank = {name: batch[name] for name in parameters if name in batch}
    has_images = True

    def look_for_images(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal has_images
        cache = cache_of(kwargs)
        has_images = any(kwargs.get(name) is not None for name in ("pixel_values", "pixel_values_videos"))
        has_images = has_images or (cache is not None and cache.get_seq_length() > 0)

    def add_nothing(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        embeddings = kwargs.get("inputs_embeds")
        if has_images or embeddings is None:
            return None
        inputs = {name: x.to(embeddings.device) for name, x in blank.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(embeddings.dtype)
        output = core.get_image_features(**inputs)
        for features in _tensors([output.get(name) for name in _FEATURES]):
            embeddings = embeddings + 0 * features.flatten()[0].to(embeddings).nan_to_num()
        return args, kwargs | {"inputs_embeds": embeddings}

    core.register_forward_pre_hook(look_for_images, with_kwargs=True)
    core.get_decoder().register_forward_pre_hook(add_nothing, with_kwargs=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested sequences."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
