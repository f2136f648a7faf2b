"""Image towers that every rank runs, also for rows without images."""

from __future__ import annotations

import inspect
from typing import Any

from accelerate.utils import recursively_apply
from torch import Tensor

from flashmask_hf.hf.call import cache_of
from flashmask_hf.hf.models import unwrap_peft

_FEATURES = ("pooler_output", "deepstack_features")
"""What a model reads of its tower's output."""


def run_tower_in_every_call(model: Any, processor: Any) -> None:
    """Make a model run its image tower on a blank image in calls without images, which changes no result.

    FSDP and ZeRO gather weights and reduce gradients in collectives, in which a rank without images would be missing.
    Calls that continue from a cache stay as they are.

    Args:
        model: a transformers model with `get_image_features`, or a PEFT model around one, not wrapped for distributed
            training.
        processor: its processor.
    """
    from PIL import Image

    core = unwrap_peft(model).base_model
    hooks = core._forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), _BlankImage) for hook in hooks):
        return  # of another trainer
    batch = processor.image_processor(images=[Image.new("RGB", (64, 64), "white")], return_tensors="pt")
    parameters = inspect.signature(core.get_image_features).parameters
    blank = _BlankImage(core, {name: batch[name] for name in parameters if name in batch})
    core.register_forward_pre_hook(blank.look_for_images, with_kwargs=True)
    core.get_decoder().register_forward_pre_hook(blank.add_nothing, with_kwargs=True)


class _BlankImage:
    """Hooks of a model and its decoder; `inputs` are arguments of the model's `get_image_features`."""

    def __init__(self, core: Any, inputs: dict[str, Tensor]):
        self._core, self._inputs, self._has_images = core, inputs, True

    def look_for_images(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a call has images, or continues from a cache."""
        cache = cache_of(kwargs)
        has_images = any(kwargs.get(name) is not None for name in ("pixel_values", "pixel_values_videos"))
        self._has_images = has_images or (cache is not None and cache.get_seq_length() > 0)

    def add_nothing(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add zero times the features of the blank image to the embeddings of a call without images."""
        embeddings = kwargs.get("inputs_embeds")
        if self._has_images or embeddings is None:
            return None
        inputs = {name: x.to(embeddings.device) for name, x in self._inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(embeddings.dtype)
        output = self._core.get_image_features(**inputs)
        features: list[Tensor] = []
        recursively_apply(features.append, [output.get(name) for name in _FEATURES])
        for x in features:
            embeddings = embeddings + 0 * x.flatten()[0].to(embeddings).nan_to_num()
        return args, kwargs | {"inputs_embeds": embeddings}
