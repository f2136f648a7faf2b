"""Positions along axes: `RopeIndex` equals `get_rope_index` of every model that has one."""

import importlib
import inspect
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from tools.model_zoo import config_of
from tools.tiny import llama_config

from flashmask_hf.collators import RopeIndex

FOLDER = Path(transformers.__file__).parent / "models"
FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/modeling_*.py") if "get_rope_index" in path.read_text())
QUICK = ("qwen2_5_vl", "qwen2_5_omni", "minicpmv4_7", "hunyuan_vl")
MODELS = {"qwen2_5_omni": "Qwen2_5OmniThinkerModel", "qwen3_omni_moe": "Qwen3OmniMoeThinkerModel"}
ROPE = dict(rope_type="default", rope_theta=1e4)
TEXT = {
    "cohere_compass": dict(rope_parameters=dict(full_attention=ROPE, sliding_attention=ROPE)),
    "ernie4_5_vl_moe": dict(rope_parameters=dict(ROPE, mrope_section=[1, 1, 2])),
    "hunyuan_vl": dict(rope_parameters=dict(ROPE, mrope_section=[1, 1, 1, 1])),
}
IMAGE, START, END = 30, 31, 32
IDS = {
    "image_token_id": IMAGE, "vision_start_token_id": START, "image_start_token_id": START, "image_start_id": START,
    "image_end_token_id": END, "image_end_id": END, "video_token_id": 33, "slice_start_id": 34, "slice_end_id": 35,
    "newline_id": 36, "audio_token_id": 37, "audio_start_token_id": 38,
}  # fmt: skip


def model_of(family):
    """Return a tiny model without weights whose class has `get_rope_index`."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(module, MODELS[family]) if family in MODELS else next(
        x for _, x in inspect.getmembers(module, inspect.isclass) if "get_rope_index" in vars(x)
    )  # fmt: skip
    config = config_of(made.config_class.model_type, **({"text_config": TEXT[family]} if family in TEXT else {}))
    for name, number in IDS.items():
        setattr(config, name, number)
    with torch.device("meta"):
        return made(config)


def document_of(family, model, sides):
    """Return a document with images of these sides in tokens, and words around them."""
    vision = getattr(model.config, "vision_config", None)
    merge = {"glm_image": 1, "minicpmv4_7": 4}.get(family, getattr(vision, "spatial_merge_size", 1))
    breaks = family == "hunyuan_vl"  # a token ends each row of an image, and one is at each end
    blocks = [x for h, w in sides for x in (8, START, *[IMAGE] * (h * (w + breaks) + 2 * breaks), END)]
    ids = torch.tensor([[5, 6, 7, *blocks, 9]])
    document = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}
    if sides:
        document["pixel_values"] = torch.zeros(1)
        document["image_grid_thw"] = torch.tensor([(1, merge * h, merge * w) for h, w in sides])
        document["target_sizes"] = document["image_grid_thw"][:, 1:]
    return document


@pytest.mark.parametrize("family", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.full) for x in FAMILIES])
def test_positions_equal_the_models(family):
    model = model_of(family)
    rope_index = pickle.loads(pickle.dumps(RopeIndex.of(torch.nn.ModuleList([model]))))
    document = document_of(family, model, [(2, 2), (2, 4)])
    takes = inspect.signature(model.get_rope_index).parameters
    want = model.get_rope_index(
        **{name: x for name, x in document.items() if name in takes},
        **({"attention_mask": torch.ones_like(document["input_ids"])} if "omni" in family else {}),
    )[0]
    got = rope_index(document)
    assert got.dtype == torch.int64
    assert torch.equal(got, want.long())
    assert (got[0] != got[-1]).any() or (got[1] != got[-1]).any()
    text = document_of(family, model, [])
    got = rope_index({"input_ids": text["input_ids"]})
    assert torch.equal(got, torch.arange(4).expand_as(got))


def test_what_cannot_be_served_raises():
    llama = transformers.LlamaForCausalLM(llama_config())
    with pytest.raises(TypeError, match="got LlamaForCausalLM, whose tokens have one position each"):
        RopeIndex.of(llama)
    model = model_of("qwen2_5_vl")
    document = document_of("qwen2_5_vl", model, [(2, 2)])
    del document["pixel_values"]  # trainers of preferences give sizes alone
    wrong = [
        {name: x for name, x in document.items() if name != "image_grid_thw"},
        {"input_ids": document["input_ids"], "video_grid_thw": document["image_grid_thw"]},
        {"input_ids": torch.tensor([[5, 6]]), "image_grid_thw": document["image_grid_thw"]},
    ]
    for given in wrong:
        with pytest.raises(ValueError, match=r"Qwen2_5_VLModel finds no positions .* Use its own processor"):
            RopeIndex.of(model)(given)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "hunyuan_vl"])
def test_types_of_images_are_found_where_the_processor_gives_none(family):
    """Also without pixels: trainers of preferences give sizes alone."""
    model = model_of(family)
    document = document_of(family, model, [(2, 2), (2, 4)])
    given = {name: document[name] for name in ("input_ids", "image_grid_thw")}
    assert torch.equal(RopeIndex.of(model)(given), RopeIndex.of(model)(document))
