"""Image towers run one attention per layer under "flashmask": their `cu_seqlens` are documents of one row."""

import collections
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from tools.model_pairs import attend, layer_inputs
from tools.support import requires
from tools.tiny import assert_exact
from tools.vision import document, tiny_model
from torch import nn
from transformers import AttentionInterface, models
from transformers.utils.generic import is_flash_attention_requested

from flashmask_hf import flashmask_attention, masks
from flashmask_hf.hf import late
from flashmask_hf.hf.attention import attention_forward
from flashmask_hf.hf.families import source_of
from flashmask_hf.hf.models import state_of

QWEN = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]
GRIDS = torch.tensor([[1, 4, 4], [2, 8, 12], [1, 6, 10], [1, 2, 2]])


@pytest.fixture
def calls(monkeypatch):
    """Count the attention calls of each class of layers."""
    counts = collections.Counter()

    def counted(module, *args, **kwargs):
        counts[type(module).__name__] += 1
        return attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flashmask", counted)
    return counts


def outputs(tower, inputs):
    out = tower(**inputs).last_hidden_state
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in tower.parameters() if x.grad is not None)]


def towers(kind):
    """Return the same tower with "flashmask" and with "sdpa"; of Qwen2.5-VL with its real head dim, 80."""
    made = []
    for attention in ("flashmask", "sdpa"):
        tower = tiny_model(kind, attention).model.visual
        if kind == "qwen2_5_vl":
            torch.manual_seed(0)
            config = type(tower.config).from_dict(tower.config.to_dict() | dict(hidden_size=160))
            tower = type(tower)._from_config(config, attn_implementation=attention).double()
        made.append(tower.train())
    return made


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", QWEN)
def test_a_layer_calls_attention_once_for_all_images(kind, calls, monkeypatch):
    built = []
    of_bounds = late.of_bounds
    monkeypatch.setattr(late, "of_bounds", lambda bounds, length: built.append(bounds) or of_bounds(bounds, length))
    ours, sdpa = towers(kind)
    inputs = dict(hidden_states=torch.randn(GRIDS.prod(1).sum(), 96, dtype=torch.float64), grid_thw=GRIDS)
    want, got = outputs(sdpa, inputs), outputs(ours, inputs)
    assert len(want) > 10
    assert_exact(got, want)
    assert sum(calls.values()) == len(ours.blocks)
    assert len(built) == (2 if kind == "qwen2_5_vl" else 1)  # a mask for windows, one for images
    ours.gradient_checkpointing_enable()
    ours.zero_grad()
    inputs["hidden_states"].requires_grad_()
    assert_exact(outputs(ours, inputs), want)
    assert sum(calls.values()) == 3 * len(ours.blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", QWEN)
def test_towers_on_a_gpu(kind, dtype):
    """Images of up to 1,200 patches: outputs and gradients are as near to those in float64 as the loop's."""
    requires("gpu")
    grids = torch.tensor([[1, 34, 30], [1, 4, 4], [2, 8, 12], [1, 30, 40]])
    patches = torch.randn(grids.prod(1).sum(), 96, generator=torch.Generator().manual_seed(0))
    exact, ours, stock = (
        torch.cat([x.flatten().double().cpu() for x in outputs(tower.to(device, kept), inputs)])
        for (tower, device, kept) in zip(
            (towers(kind)[1], *towers(kind)), ("cpu", "cuda", "cuda"), (torch.float64, dtype, dtype), strict=True
        )
        for inputs in [dict(hidden_states=patches.to(device, kept), grid_thw=grids.to(device))]
    )
    assert 0 < (stock - exact).norm() < 0.2 * exact.norm()
    assert (ours - exact).norm() < 2 * (stock - exact).norm() + 1e-5 * exact.norm()


_DENSE = "cu_seqlens" not in source_of(importlib.import_module("transformers.models.pixtral.modeling_pixtral"))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_5_vl",
        pytest.param("pixtral", marks=pytest.mark.skipif(_DENSE, reason="this transformers makes a dense mask for it")),
    ],
)
def test_documents_of_the_text_do_not_reach_the_tower(kind, calls):
    model, alone = tiny_model(kind), tiny_model(kind, "sdpa")
    documents = [document(kind, [(2, 3), (4, 2)], 5), document(kind, [(2, 2)], 4, first=0)]
    keys = ("pixel_values", "image_grid_thw", "image_sizes")
    if kind == "pixtral":  # which are padded to the largest
        sides = [max(x["pixel_values"].shape[i] for x in documents) for i in (2, 3)]
        for one in documents:
            height, width = one["pixel_values"].shape[2:]
            one["pixel_values"] = nn.functional.pad(one["pixel_values"], (0, sides[1] - width, 0, sides[0] - height))
    row = {key: torch.cat([x[key] for x in documents]) for key in keys if key in documents[0]}
    row["input_ids"] = torch.cat([x["input_ids"] for x in documents], 1)
    lengths = [x["input_ids"].shape[1] for x in documents]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    want = [alone(**{key: x for key, x in one.items() if key != "labels"}) for one in documents]
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    if "image_grid_thw" in row:
        axes = [
            alone.model.get_rope_index(
                x["input_ids"], image_grid_thw=x["image_grid_thw"], mm_token_type_ids=x["mm_token_type_ids"]
            )[0]
            for x in documents
        ]
        places = torch.cat([places[None], torch.cat(axes, -1)])
    marks = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=max(lengths), max_length_k=max(lengths))
    for given in (marks, dict(startend_row_indices=masks.causal_document(lengths).indices)):
        calls.clear()
        got = model(**row, position_ids=places, use_cache=False, **given).logits
        assert_exact([got], [torch.cat([x.logits for x in want], 1)])
        assert set(calls.values()) == {2}  # layers of the tower and of the text model


@pytest.mark.parametrize("causal", [True, False])
def test_bounds_of_a_layer_without_a_mask_are_documents(causal):
    query, key = layer_inputs(batch=1)
    edges = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    mask = (masks.causal_document if causal else masks.document)([2, 4])
    got, _ = attend(batch=1, cu_seq_lens_q=edges, is_causal=causal)
    assert torch.equal(got, flashmask_attention(query, key, key, mask).transpose(1, 2))


def test_only_towers_ask_for_the_branch_of_flash_attention():
    model = tiny_model("qwen2_5_vl")
    for part in (model, model.model.visual, model.model.language_model):
        state_of(part)
    config = model.config
    answers = [is_flash_attention_requested(x) for x in (config, config.text_config, config.vision_config)]
    assert answers == [False, False, True]
    assert not is_flash_attention_requested(config.vision_config, version=2)
    model.set_attn_implementation({"vision_config": "sdpa"})
    assert not is_flash_attention_requested(config.vision_config)


LOOP = "lengths.tolist(), dim=2"
"""Code of layers that attend within images, windows or clips one after another."""

FILES = sorted(file for file in Path(models.__path__[0]).glob("*/modeling_*.py") if LOOP in file.read_text())


def layers_with_loops(module):
    """Return a layer of each class with a loop, from models made without memory."""
    found = {}
    for made in vars(module).values():
        config = getattr(made, "config_class", None)
        if not isinstance(config, type) or made.__module__ != module.__name__:
            continue
        if not any(x in config.__name__ for x in ("Vision", "Audio", "Radio", "Encoder")):
            continue
        with torch.device("meta"):
            model = made._from_config(config())
        state_of(model)
        found |= {type(x): x for x in model.modules() if LOOP in source_of(type(x).forward)}
    return found.values()


@pytest.mark.full
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_every_layer_with_a_loop_calls_attention_once(file, calls):
    layers = layers_with_loops(importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}"))
    assert layers
    for layer in layers:
        cls, results = type(layer), []
        takes = {*inspect.signature(cls.__init__).parameters, *inspect.signature(cls.forward).parameters}
        angles = torch.randn(13, layer.head_dim, dtype=torch.float64)
        options = dict(max_seqlen=7, position_embeddings=(angles.cos(), angles.sin()))
        options = {name: x for name, x in options.items() if name in takes}
        if "hunyuan" in file.stem:
            options["attention_mask"] = None
        for attention in ("sdpa", "flashmask"):
            config = type(layer.config).from_dict(layer.config.to_dict())
            config._attn_implementation = attention
            torch.manual_seed(0)
            made = (cls(config, 0) if "layer_idx" in takes else cls(config)).double()
            width = next(x.shape[1] for x in made.parameters() if x.dim() == 2)
            rows = torch.randn(*[1] * any(x in file.stem for x in ("radio", "hunyuan", "minicpm")), 13, width)
            calls.clear()
            out = made(rows.double(), cu_seqlens=torch.tensor([0, 5, 12, 13], dtype=torch.int32), **options)
            results.append(out[0] if isinstance(out, tuple) else out)
        assert sum(calls.values()) == 1
        assert_exact(results[:1], results[1:])
