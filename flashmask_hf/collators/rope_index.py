"""Positions of tokens along the axes of models with multimodal rotary embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_BATCH_KEYS = {"second_per_grids": "video_second_per_grid"}
"""Batch keys of arguments of `get_rope_index` that have another name."""

_IMAGES = ("pixel_values", "image_", "target_sizes")
"""Beginnings of the keys of images."""


class RopeIndex:
    """Positions of a document's tokens along a model's axes (time, height, width), without the model's weights.

    It calls the model's `get_rope_index` on an instance that has only a config, so workers can unpickle it.

    Args:
        model_class: a class with `get_rope_index`, such as `Qwen3VLModel`.
        config: its config.
        attributes: numbers that its constructor would set, such as `spatial_merge_size` of `Qwen2_5Omni` models.

    Raises:
        TypeError: the class has no `get_rope_index`: its tokens have one position each.

    Example:
        >>> rope_index = RopeIndex.of(model)  # doctest: +SKIP
        >>> collator = DataCollatorForPackedVisionLanguageModeling(processor, rope_index=rope_index)  # doctest: +SKIP
    """

    def __init__(self, model_class: type[nn.Module], config: Any, **attributes: Any):
        if not hasattr(model_class, "get_rope_index"):
            raise TypeError(
                f"model_class must have get_rope_index, got {model_class.__name__}, whose tokens have one position "
                "each. Leave rope_index out."
            )
        self._model: Any = model_class.__new__(model_class)
        nn.Module.__init__(self._model)
        for name, value in {**attributes, "config": config}.items():
            setattr(self._model, name, value)

    @classmethod
    def of(cls, model: nn.Module) -> RopeIndex:
        """Return the positions of a model, which may be wrapped (PEFT, DDP, FSDP).

        Raises:
            TypeError: no submodel has `get_rope_index`.
        """
        found = next((part for part in model.modules() if hasattr(type(part), "get_rope_index")), model)
        numbers = {name: x for name, x in vars(found).items() if isinstance(x, (int, float)) and name[0] != "_"}
        return cls(type(found), getattr(found, "config", None), **numbers)

    def __call__(self, document: Mapping[str, Tensor]) -> Tensor:
        """Return the positions of a document alone, int64 [axes, 1, n].

        Args:
            document: the processor's output: `input_ids`, `mm_token_type_ids` (may be missing without videos), int64
                [1, n], and sizes of images and videos, such as `image_grid_thw`, int64 [images, 3].

        Raises:
            ValueError: the document lacks inputs for its images; or a position is fractional.
        """
        input_ids = document["input_ids"]
        given: dict[str, Any] = {"attention_mask": torch.ones_like(input_ids)}
        for name in inspect.signature(self._model.get_rope_index).parameters:
            value = document.get(_BATCH_KEYS.get(name, name))
            if value is not None:
                given[name] = value
            elif name == "mm_token_type_ids" and not any("video" in key for key in document):
                # As processors mark images. Frames of a video may have the image's token.
                token = getattr(self._model.config, "image_token_id", None)
                types = torch.zeros_like(input_ids) if token is None else (input_ids == token).long()
                if types.any() or not any(key.startswith(_IMAGES) for key in document):
                    given[name] = types
        try:
            axes = self._model.get_rope_index(**given)[0]
        except (TypeError, StopIteration) as error:  # types or sizes of images are missing
            problem = f"{type(self._model).__name__} finds no positions from {', '.join(given)}"
            raise ValueError(f"{problem}. Use its own processor, with return_mm_token_type_ids=True.") from error
        if (axes != axes.long()).any():
            raise ValueError("positions are fractional for video_second_per_grid; sample videos at an integer rate")
        return axes.long()


def rope_index_of(model: nn.Module) -> RopeIndex | None:
    """Return `RopeIndex.of(model)`, or None for a model whose tokens have one position each."""
    has_axes = any(hasattr(type(part), "get_rope_index") for part in model.modules())
    return RopeIndex.of(model) if has_axes else None
