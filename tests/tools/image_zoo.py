"""Packed rows with images in tiny random models of every family, for the section on images in docs/models.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tools.model_zoo import BOUND, NEMOTRON_H, Outcome, config_of, first_sentence
from tools.vision import tower_of
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModelForImageTextToText, Gemma3nVisionConfig, TimmWrapperConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto import modeling_auto

from flashmask_hf.collators import DataCollatorForPackedVisionLanguageModeling
from flashmask_hf.collators.images import TOKEN_TYPES
from flashmask_hf.collators.rope_index import rope_index_of
from flashmask_hf.collators.vision import _join

IMAGE = 47
"""Id of image tokens in configs that have none."""


def _axes(*section: int) -> dict[str, Any]:
    return dict(text_config=dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[*section])))


_WINDOWS: dict[str, Any] = dict(vision_config=dict(window_size=32))
_SIZES: dict[str, Any] = dict(image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]])
_OMNI: dict[str, Any] = dict(image_token_id=40, video_token_id=41, audio_token_id=42, vision_start_token_id=46)
_LAYERS = ("full_attention", "sliding_attention")
_SAM = dict(hidden_size=32, num_attention_heads=4, output_channels=32, downsample_channels=[32, 32], window_size=2)
_OCR: dict[str, Any] = dict(vision_config=dict(sam_config=_SAM, encoder_config=dict(hidden_size=32)))

_FAMILIES: dict[str, dict[str, Any]] = {
    "apertus1p5": dict(
        image_token_offset=30,
        audio_token_offset=38,
        vision_config=dict(codebook_size=8, base_channels=32),
        audio_config=dict(codebook_size=8),
    ),
    "aria": dict(image_token_index=IMAGE, projector_patch_to_query_dict={16: 4}, vision_feature_layer=-1),
    "blip-2": dict(image_token_index=IMAGE, num_query_tokens=4),
    "chameleon": dict(
        image_token_id=IMAGE,
        vocabulary_map={"<image>": IMAGE, **{f"IMGIMG{chr(ord('A') + i)}Z": 30 + i for i in range(8)}},
        vq_config=dict(num_embeddings=8, base_channels=32, channel_multiplier=[1, 1, 2], resolution=32),
    ),
    "cohere_compass": dict(
        text_config=dict(rope_parameters={x: _axes(2, 1, 1)["text_config"]["rope_parameters"] for x in _LAYERS})
    ),
    "deepseek_ocr2": _OCR | dict(text_config=dict(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2)),
    "deepseek_vl_hybrid": dict(high_res_vision_config=dict(global_attn_indexes=[0, 1])),
    "diffusion_gemma": dict(
        text_config=dict(
            use_bidirectional_attention="vision", num_experts=4, top_k_experts=2, moe_intermediate_size=16
        ),
        vision_config=tower_of("gemma4"),
    ),
    "dots3_note": dict(
        audio_config=dict(adapter_input_size=32, adapter_out_dim=32),
        vision_config=dict(adapter_in_dim=32, adapter_out_dim=32),
    ),
    "emu3": dict(
        image_token_id=IMAGE,
        vocabulary_map={
            "<image>": IMAGE,
            "<|extra_200|>": 46,
            **{f"<|visual token {i:06}|>": 30 + i for i in range(8)},
        },
        vq_config=dict(codebook_size=8, base_channels=32, channel_multiplier=[1, 1, 1], temporal_downsample_factor=1),
    ),
    "ernie4_5_vl_moe": _axes(1, 1, 2),
    "exaone4_5": _WINDOWS,
    "fuyu": dict(patch_size=8),
    "gemma3": dict(mm_tokens_per_image=4),
    "gemma3n": dict(text_config=dict(num_kv_shared_layers=0), vision_soft_tokens_per_image=16),
    "gemma4": dict(vision_config=tower_of("gemma4"), text_config=dict(use_bidirectional_attention="vision")),
    "gemma4_unified": dict(
        vision_config=dict(mm_embed_dim=32, mm_posemb_size=64, output_proj_dims=32, patch_size=4, pooling_kernel_size=2)
    ),
    **dict.fromkeys(("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl"), _axes(2, 1, 1)),
    "glm4v_moe": _axes(1, 1, 0),
    "granite4_vision": _SIZES
    | dict(
        deepstack_layer_map=[[-2, 0]],
        downsample_rate="1/2",
        spatial_target_layers=[0, 1, 0, 1],
        vision_config=dict(hidden_size=64, num_hidden_layers=2),
    ),
    "hunyuan_vl": _axes(1, 1, 1, 1),
    "hyperclovax_vision_v2": _WINDOWS,
    "inkling_mm_model": dict(vision_config=dict(n_layers=4, patch_size=4, temporal_patch_size=2)),
    "instructblip": dict(image_token_index=IMAGE),
    "instructblipvideo": dict(video_token_index=IMAGE),
    "lfm2_vl": dict(
        vision_config=dict(vision_use_head=False), text_config=dict(layer_types=["conv", "full_attention"])
    ),
    "llama4": dict(
        vision_config=dict(intermediate_size=128, projector_input_dim=32, projector_output_dim=32, vision_output_dim=32)
    ),
    "llava_next": _SIZES,
    "llava_next_video": _SIZES,
    "llava_onevision": _SIZES,
    "minicpm_ocr": dict(image_token_id=IMAGE),
    "minicpmv4_6": dict(image_token_id=IMAGE),
    "minicpmv4_7": dict(image_token_id=IMAGE),
    "molmo2": dict(
        adapter_config=dict(vision_feature_layer=[0, 1]),
        image_patch_id=IMAGE,
        image_token_id=IMAGE,
        vision_config=dict(num_position_embeddings=16),
    ),
    "muse_glimmer": dict(out_hidden_size=128),
    "muse_spark": dict(out_hidden_size=128),
    "nemotron_h_omni": dict(image_token_id=IMAGE, vision_hidden_size=32, text_config=NEMOTRON_H),
    "perception_lm": dict(
        vision_config=dict(model_args=dict(embed_dim=32)), vision_use_cls_token=False, projector_pooling_ratio=1
    ),
    "qwen2_5_omni_thinker": _axes(2, 1, 1) | _WINDOWS | _OMNI,
    "qwen2_5_vl": _axes(2, 1, 1) | _WINDOWS,
    "qwen3_omni_moe_thinker": _OMNI,
    "shieldgemma2": dict(mm_tokens_per_image=4),
    "step3p7": dict(text_config=dict(sliding_window=6)),
    "t5gemma2": dict(encoder=dict(mm_tokens_per_image=4)),
    "unlimited_ocr": _OCR,
    "vipllava": dict(vision_feature_layers=[-1, -2]),
}
"""Fields that the tiny towers need besides those of `config_of`."""


_GRID = [[4, 4]]
_MINICPM = dict(pixel_values=(1, 3, 8, 128), target_sizes=_GRID)
_IMAGE = (1, 3, 32, 32)
_PLAIN = dict(pixel_values=_IMAGE)
_LOCAL = dict(pixel_values_local=(2, 3, 32, 32), num_local_patches=[2])
_INKLING = dict(image_grid_thw=[[1, 2, 2]], pixel_values=(4, 16, 16, 3))
_QFORMER = dict(qformer_input_ids=[[5, 6]], qformer_attention_mask=[[1, 1]])

_PIXELS: dict[str, dict[str, Any]] = {
    "aria": dict(pixel_values=_IMAGE, pixel_mask=[[[True] * 32] * 32]),
    **dict.fromkeys(("blip", "git", "pp_formulanet", "vision-encoder-decoder"), _PLAIN),
    "deepseek_ocr2": _PLAIN | _LOCAL,
    "deepseek_vl_hybrid": dict(pixel_values=_IMAGE, high_res_pixel_values=_IMAGE),
    "diffusion_gemma": dict(pixel_values=(1, 4, 48), image_position_ids=[[[0, 0], [1, 0], [0, 1], [1, 1]]]),
    "fuyu": dict(pixel_values=(1, 4, 192)),
    "gemma4_unified": dict(pixel_values=(1, 4, 192), image_position_ids=[[[0, 0], [1, 0], [0, 1], [1, 1]]]),
    "granite_docling": dict(pixel_values=(1, 1, 3, 32, 32), pixel_attention_mask=[[True]]),
    "idefics": dict(pixel_values=(1, 1, 3, 32, 32), image_attention_mask=[[[1]] * 9]),
    **dict.fromkeys(("inkling2", "inkling2_loop"), _INKLING),
    "inkling_mm_model": dict(pixel_values=(4, 2, 4, 4, 3)),
    "instructblip": _PLAIN | _QFORMER,
    "instructblipvideo": dict(pixel_values=(1, 4, 3, 32, 32)) | _QFORMER,
    "kosmos-2": dict(pixel_values=_IMAGE, image_embeds_position_mask=[[1]]),
    "kosmos-2.5": dict(flattened_patches=(1, 4, 194), width=[2], height=[2], image_embeds_position_mask=[[1]]),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _MINICPM),
    "mllama": dict(pixel_values=(1, 1, 1, 3, 32, 32), aspect_ratio_ids=[[1]], aspect_ratio_mask=[[[1]]]),
    "molmo2": dict(pixel_values=(1, 16, 192), image_token_pooling=[[0, 1, 4, 5]], image_grids=[[1, 1, 0, 0]]),
    "nemotron_h_omni": dict(pixel_values=(16, 192), image_grid_hw=_GRID),
    "perception_lm": dict(pixel_values=(1, 1, 3, 32, 32)),
    "pi0": dict(pixel_values=(1, 1, 3, 32, 32), pixel_attention_mask=[[1]], state=(1, 32)),
    "pix2struct": dict(flattened_patches=(1, 4, 194)),
    "step3p7": _PLAIN | _LOCAL,
    "udop": dict(pixel_values=_IMAGE, bbox=[[[0, 0, 1, 1]] * 9]),
    "unlimited_ocr": dict(pixel_values=_IMAGE, patches_grid=[[2, 1]]) | _LOCAL,
}
"""Inputs of one image that no form of `_pixels` has: shapes of pixels, and numbers."""


def families() -> list[str]:
    """Return the model types that transformers lists for images and text, and that take images."""
    return sorted({*modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {"evolla", "mistral4"})


class _Convolution(nn.Module):
    """Image tower of one convolution, in place of a model of timm."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.in_rows = "embed_dim" in (config.model_args or {})  # PerceptionLM's
        self.patches = nn.Conv2d(3, 32, 8, 8)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> _Convolution:
        return cls(config)

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        features = self.patches(pixel_values)
        if self.in_rows:
            features = features.flatten(2).mT
        return BaseModelOutputWithPooling(last_hidden_state=features)


def build(family: str, attention: str | dict[str, str]) -> Any:
    """Return a tiny model with random weights; arguments as in `model_zoo.build`."""
    torch.manual_seed(0)
    config = config_of(family, **_FAMILIES.get(family, {}))
    timm = dict.fromkeys((TimmWrapperConfig, Gemma3nVisionConfig), _Convolution)
    with mock.patch.dict(MODEL_MAPPING._extra_content, timm):
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model


def _pixels(model: Any, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of one image in the forms that towers take."""
    names = inspect.signature(_core(model).get_image_features).parameters
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
        is_tall = bool(torch.randint(2, (), generator=generator))
        sides = (4 * merge, 2 * merge) if is_tall else (2 * merge, 4 * merge)
        patches, grid = 8 * merge**2, torch.tensor([[1, *sides]])
        given = {"image_grid_thw": grid}
        if "image_merge_sizes" in names:
            given["image_merge_sizes"] = torch.tensor([merge])
        values = channels * field("temporal_patch_size", field("patch_temporal", 1)) * patch**2
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
            real = torch.ones(1, 1, side, side, dtype=torch.bool)
            yield {"pixel_values": draw(1, 1, 3, side, side), "pixel_attention_mask": real}
        if "pixel_values_images" in names:
            yield {"pixel_values_images": draw(1, 3, side, side)}
        for size in (side, 32):
            yield {"pixel_values": draw(1, 3, size, size)}


def _count(features: Any, hidden: int) -> int:
    """Return how many tokens an image's features are, of whatever nesting."""
    if isinstance(features, dict):  # a ModelOutput
        layers = features.get("deepstack_features")
        features = features.get("pooler_output", layers[0][1] if layers else features.get("last_hidden_state"))
    if isinstance(features, Tensor):
        return features.numel() // hidden
    return sum(_count(x, hidden) for x in features if x is not None)


def _core(model: Any) -> Any:
    """Return the submodel that makes the features of images, or None without one."""
    return next((part for part in [*model.modules()][::-1] if hasattr(part, "get_image_features")), None)


def _given(shape_or_numbers: Any, generator: torch.Generator) -> Tensor:
    """Return an input of `_PIXELS`."""
    if isinstance(shape_or_numbers, tuple):
        return torch.randn(shape_or_numbers, generator=generator)
    return torch.tensor(shape_or_numbers)


def _image(model: Any, generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    """Return the inputs of an image and the number of its tokens: 0 in models that put images elsewhere."""
    own = _PIXELS.get(model.config.model_type)
    forms = [*_pixels(model, generator)] if own is None else [{name: _given(x, generator) for name, x in own.items()}]
    for pixels in forms:
        try:
            features = _core(model).get_image_features(**pixels)
        except Exception:  # the tower takes another form
            continue
        return pixels, _count(features, model.config.get_text_config().hidden_size)
    if own is None:
        raise ValueError("the image inputs are another form")
    return forms[0], 0


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
    pixels = [pixels for pixels, _ in found]
    document = {name: _join(name, pixels) for name in (pixels or [{}])[0]} | {"input_ids": ids}
    parameters = inspect.signature(model.forward).parameters
    marks = ids == token
    if model.config.model_type == "paligemma":  # the prompt ends with the last image
        marks = ~marks.flip(1).cumsum(1).flip(1).bool()
    return document | {name: marks.long() for name in TOKEN_TYPES if name in parameters}


def _row(model: Any, documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the documents as the collator packs them, with positions along the axes of a model that has any."""
    collator = DataCollatorForPackedVisionLanguageModeling(
        SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0)),
        collator=lambda examples: examples[0]["document"],
        rope_index=rope_index_of(model),
    )
    row = collator([{"document": own | {"labels": own["input_ids"]}} for own in documents])
    row.pop("labels")
    return row


def _under_flashmask(family: str) -> tuple[Any, str]:
    """Return a model under "flashmask", and which part of it is not: its towers, if they refuse."""
    try:
        return build(family, "flashmask"), ""
    except NotImplementedError:
        parts = dict.fromkeys(config_of(family, **_FAMILIES.get(family, {})).sub_configs, "eager")
        if "text_config" not in parts:
            raise
        ours = build(family, parts | {"text_config": "flashmask"})
        return ours, "with text_config alone under 'flashmask', and the image tower under 'eager'"


@torch.no_grad()
def examine(family: str) -> Outcome:
    """Return the outcome of a row of documents with one, no and two images.

    Raises:
        Exception: whatever keeps the tiny model from being built or run with eager attention.
    """
    generator = torch.Generator().manual_seed(1)
    eager = build(family, "eager")
    pixels = inspect.signature(eager.forward).parameters.get("pixel_values")
    needs_image = pixels is not None and pixels.default is inspect.Parameter.empty
    documents = [_document(eager, images, generator) for images in (1, int(needs_image), 2)]
    try:
        row = _row(eager, documents)
        ours, note = _under_flashmask(family)
        ours.load_state_dict(eager.state_dict())
        got = ours(**row, use_cache=False).logits
    except Exception as error:
        return Outcome("raises", first_sentence(error))
    masked = [own | {"attention_mask": torch.ones_like(own["input_ids"])} for own in documents]  # for Omni's positions
    want = torch.cat([eager(**own, use_cache=False).logits for own in masked], 1)
    if not want.isfinite().all():
        raise ValueError("eager attention gives infinite or undefined numbers")
    near = (got - want).abs().max() <= BOUND * want.abs().max()
    return Outcome("yes", note) if near else Outcome("wrong")
