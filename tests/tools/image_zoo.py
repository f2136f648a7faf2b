"""Packed rows with images in tiny random models of every family, for the section on images in docs/models.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tools.model_zoo import BOUND, Outcome, config_of, first_sentence
from tools.vision import tower_of
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

from flashmask_hf import masks
from flashmask_hf.collators import RopeIndex

TOKENS = ("input_ids", "mm_token_type_ids", "token_type_ids")
IMAGE = 47
"""Id of image tokens in configs that have none."""


def _axes(*section: int) -> dict[str, Any]:
    return dict(text_config=dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[*section])))


_WINDOWS: dict[str, Any] = dict(vision_config=dict(window_size=32))
_SIZES: dict[str, Any] = dict(image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]])
_OMNI: dict[str, Any] = dict(image_token_id=40, video_token_id=41, audio_token_id=42, vision_start_token_id=46)
_LAYERS = ("full_attention", "sliding_attention")

_FAMILIES: dict[str, dict[str, Any]] = {
    "cohere_compass": dict(
        text_config=dict(rope_parameters={x: _axes(2, 1, 1)["text_config"]["rope_parameters"] for x in _LAYERS})
    ),
    "ernie4_5_vl_moe": _axes(1, 1, 2),
    "exaone4_5": _WINDOWS,
    "gemma3": dict(mm_tokens_per_image=4),
    "gemma4": dict(vision_config=tower_of("gemma4"), text_config=dict(use_bidirectional_attention="vision")),
    "glm46v": _axes(2, 1, 1),
    "glm4v": _axes(2, 1, 1),
    "glm4v_moe": _axes(1, 1, 0),
    "glm_ocr": _axes(2, 1, 1),
    "glmga": _axes(2, 1, 1),
    "hunyuan_vl": _axes(1, 1, 1, 1),
    "hyperclovax_vision_v2": _WINDOWS,
    "lfm2_vl": dict(
        vision_config=dict(vision_use_head=False), text_config=dict(layer_types=["conv", "full_attention"])
    ),
    "llama4": dict(
        vision_config=dict(intermediate_size=128, projector_input_dim=32, projector_output_dim=32, vision_output_dim=32)
    ),
    "llava_next": _SIZES,
    "llava_next_video": _SIZES,
    "llava_onevision": _SIZES,
    "paddleocr_vl": _axes(2, 1, 1),
    "qwen2_5_omni_thinker": _axes(2, 1, 1) | _WINDOWS | _OMNI,
    "qwen2_5_vl": _axes(2, 1, 1) | _WINDOWS,
    "qwen2_vl": _axes(2, 1, 1),
    "qwen3_omni_moe_thinker": _OMNI,
    "shieldgemma2": dict(mm_tokens_per_image=4),
    "step3p7": dict(text_config=dict(sliding_window=6)),
    "vipllava": dict(vision_feature_layers=[-1, -2]),
}
"""Fields that the tiny towers need besides those of `config_of`."""


def families() -> list[str]:
    """Return the model types that transformers lists for images and text."""
    return sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def build(family: str, attention: str) -> Any:
    """Return a tiny model with random weights; arguments as in `model_zoo.build`."""
    torch.manual_seed(0)
    config = config_of(family, **_FAMILIES.get(family, {}))
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model


def _pixels(model: Any, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of one image in the forms that towers take."""
    core = getattr(model, "model", model)
    names = inspect.signature(core.get_image_features).parameters
    tower = getattr(model.config, "vision_config", None) or model.config

    def field(name: str, default: int) -> int:
        found = getattr(tower, name, None) or default
        return found if isinstance(found, int) else found[0]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    patch, side = field("patch_size", 8), field("image_size", 32)
    channels = field("in_channels", field("num_channels", 3))
    if "image_grid_thw" in names:
        merge = field("spatial_merge_size", 2)
        patches, grid = 8 * merge**2, torch.tensor([[1, 2 * merge, 4 * merge]])
        given = {"image_grid_thw": grid}
        if "image_merge_sizes" in names:
            given["image_merge_sizes"] = torch.tensor([merge])
        values = channels * field("temporal_patch_size", 1) * patch**2
        for shape in ((patches, values), (patches, channels, patch, patch), (patches, channels * patch**2)):
            yield given | {"pixel_values": draw(*shape)}
    elif "image_position_ids" in names:
        size = field("pooling_kernel_size", 2)
        positions = torch.tensor([[(x, y) for y in range(size) for x in range(2 * size)]])
        yield {"pixel_values": draw(1, 2 * size**2, 3 * patch**2), "image_position_ids": positions}
    elif "spatial_shapes" in names:
        shapes, real = torch.tensor([[4, 4]]), torch.ones(1, 16, dtype=torch.int64)
        yield {"pixel_values": draw(1, 16, 3 * patch**2), "spatial_shapes": shapes, "pixel_attention_mask": real}
    else:
        if "image_sizes" in names:
            yield {"pixel_values": draw(1, 3, side, side), "image_sizes": torch.tensor([[side, side]])}
            yield {"pixel_values": draw(1, 3, 3, side, side), "image_sizes": torch.tensor([[side, 2 * side]])}
        if "pixel_attention_mask" in names:
            yield {"pixel_values": draw(1, 1, 3, side, side)}
        if "pixel_values_images" in names:
            yield {"pixel_values_images": draw(1, 3, side, side)}
        for size in (side, 32):
            yield {"pixel_values": draw(1, 3, size, size)}


def _count(features: Any, hidden: int) -> int:
    """Return how many tokens an image's features are, of whatever nesting."""
    if isinstance(features, dict):  # a ModelOutput
        features = features.get("pooler_output", features.get("last_hidden_state"))
    if isinstance(features, Tensor):
        return features.numel() // hidden
    return sum(_count(x, hidden) for x in features if x is not None)


def _image(model: Any, generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    """Return the inputs of an image and the number of its tokens."""
    core = getattr(model, "model", model)
    for pixels in _pixels(model, generator):
        try:
            features = core.get_image_features(**pixels)
        except Exception:  # the tower takes another form
            continue
        return pixels, _count(features, model.config.get_text_config().hidden_size)
    raise ValueError("the image inputs are another form")


def _document(model: Any, images: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the inputs of a document of words and images."""
    found = [_image(model, generator) for _ in range(images)]
    token = getattr(model.config, "image_token_id", getattr(model.config, "image_token_index", IMAGE))

    def words(count: int) -> Tensor:
        return torch.randint(20, 30, (1, count), generator=generator)

    start = getattr(model.config, "vision_start_token_id", token)
    before = [torch.full((1, 1), start)] * (start != token)  # distinct in configs that name both
    parts = [words(3)]
    for _, count in found:
        parts += [*before, torch.full((1, count), token), words(2)]
    ids = torch.cat([*parts, words(4)], 1)
    document = _joined([pixels for pixels, _ in found]) | {"input_ids": ids}
    parameters = inspect.signature(model.forward).parameters
    last = int((ids == token).nonzero()[-1, 1]) if images else 0
    types = torch.arange(ids.shape[1])[None] > last if model.config.model_type == "paligemma" else ids == token
    return document | {name: types.long() for name in TOKENS[1:] if name in parameters}


def _joined(documents: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join documents along the row, and their images: axis 1 of pixels [1, images, C, H, W] (Idefics)."""
    joined = {}
    for name in dict.fromkeys(name for own in documents for name in own):
        values = [own[name] for own in documents if name in own]
        in_row = name in TOKENS or (values[0].dim() == 5 and not any("image_sizes" in own for own in documents))
        joined[name] = torch.cat(values, int(in_row))
    return joined


def _row(model: Any, documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a packed row with positions, along the axes of a model that has any, and mask indices."""
    row = _joined(documents)
    lengths = [own["input_ids"].shape[1] for own in documents]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    if any(hasattr(part, "get_rope_index") for part in (model, getattr(model, "model", None))):
        rope_index = RopeIndex.of(model)
        axes = torch.cat([rope_index(own) for own in documents], -1)
        positions = torch.cat([positions[None], axes])[-4:]
        row.pop("mm_token_type_ids", None)
    return row | {"position_ids": positions, "startend_row_indices": masks.causal_document(lengths).indices}


@torch.no_grad()
def examine(family: str) -> Outcome:
    """Return the outcome of a row of documents with one, no and two images.

    Raises:
        Exception: whatever keeps the tiny model from being built or run with eager attention.
    """
    generator = torch.Generator().manual_seed(1)
    eager = build(family, "eager")
    documents = [_document(eager, images, generator) for images in (1, 0, 2)]
    masked = [own | {"attention_mask": torch.ones_like(own["input_ids"])} for own in documents]  # for Omni's positions
    want = torch.cat([eager(**own, use_cache=False).logits for own in masked], 1)
    if not want.isfinite().all():
        raise ValueError("eager attention gives infinite or undefined numbers")
    row = _row(eager, documents)
    try:
        ours = build(family, "flashmask")
        ours.load_state_dict(eager.state_dict())
        got = ours(**row, use_cache=False).logits
    except Exception as error:
        return Outcome("raises", first_sentence(error))
    near = (got - want).abs().max() <= BOUND * want.abs().max()
    return Outcome("yes" if near else "wrong")
