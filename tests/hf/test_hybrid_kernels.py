"""The kernels of other packages keep packed documents apart in models with recurrent or convolutional layers.

They run on a GPU, in a GPU lane with transformers 5.23, causal-conv1d, mamba-ssm and flash-linear-attention installed;
checks/test_recurrent.py runs the same models with stand-ins for the kernels. On a Hopper GPU the backward of
flash-linear-attention 0.6 needs Triton 3.7.1 or TileLang.
"""

import sys
import warnings

import pytest
import torch
import transformers
from tools import model_zoo
from transformers import CONFIG_MAPPING

from flashmask_hf.collators import DataCollatorForPackedLanguageModeling
from flashmask_hf.hf import families

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # what the packages of the kernels warn of is not this package's business
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # one that raises would make transformers do without the package
    for _module in families._MODULES.values():
        families._can_import(_module)

ROWS = [[5, 1, 67, 3, 130, 9], [41, 2, 64, 16, 33]]
"""Lengths of the documents of each row. Some end within a chunk of a scan (32 tokens, the delta rule 64), and some are
longer than one."""

LEAST = {"olmo_hybrid": 2}
"""Fewest tokens of a document, packed or alone: there causal-conv1d 1.7 refuses the gradients of a row of one token,
which are laid out with a stride of 1."""

ROW_LENGTH = 224

_ATTENTION = dict(hidden_size=64, head_dim=16, max_position_embeddings=256)
_MAMBA = _ATTENTION | dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=32, mamba_chunk_size=32)
_DELTA = _ATTENTION | dict(linear_key_head_dim=64, linear_value_head_dim=64)
_ALL_EXPERTS = dict(num_experts_per_tok=4)  # rounding would change the choice of some
FIELDS = {
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA | dict(mamba_d_ssm=128),
    "granitemoehybrid": _MAMBA | _ALL_EXPERTS,
    "lfm2": _ATTENTION,
    "lfm2_moe": _ATTENTION | _ALL_EXPERTS,
    "nemotron_h": _ATTENTION | dict(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=32, chunk_size=32),
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA | _ALL_EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _ALL_EXPERTS,
    "zamba2": dict(
        hidden_size=64,
        attention_hidden_size=128,
        attention_head_dim=32,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_d_state=32,
        chunk_size=32,
        max_position_embeddings=256,
    ),
}
"""Sizes that the kernels take: channels in eights, for vector loads, and chunks shorter than a document."""

SCALES = {family: 0.25 if fields.keys() >= _DELTA.keys() else 0.5 for family, fields in FIELDS.items()}
SCALES["falcon_h1"] = 1.0
"""By how much weights are scaled: the state carries much between documents, and rounding is a few percent at most."""

PLAIN = (
    "causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined", "torch_chunk_gated_delta_rule",
)  # fmt: skip
"""Functions of transformers' models that call a kernel, or plain torch where its package is missing."""


KERNELS = [name for name, family in families.FAMILIES.items() if family.kernels]
"""Families with kernels that keep documents apart."""


def require_kernels(family):
    missing = families.missing_kernels(model_zoo.config_of(family, **FIELDS[family]))
    if missing is None:
        pytest.skip("transformers hands the documents' boundaries to kernels since 5.23")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def build(family, attention, dtype, device):
    """Return a tiny model, whose weights are those of bfloat16 in every dtype."""
    model = model_zoo.build(family, attention, **FIELDS[family])
    model.set_experts_implementation("eager")  # one loop for all dtypes and devices
    for name, parameter in model.named_parameters():
        new = parameter * SCALES[family] if parameter.dim() > 1 else parameter
        if name.endswith("A_log"):
            new = new - 3  # a twentieth of the decay, so that the state outlives a chunk
        parameter.data = new.to(torch.bfloat16).to(dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and "inv_freq" not in name:  # angles stay float32, as in from_pretrained
            buffer.data = buffer.to(dtype)
    return model.to(device)


def documents_and_rows(family):
    """Return documents, the rows that the collator makes of them, and which tokens of the rows are real.

    The delta rule takes one row a batch.
    """
    one = "flash-linear-attention" in families.FAMILIES[family].kernels
    collate = DataCollatorForPackedLanguageModeling(pad_to_multiple_of=ROW_LENGTH)
    documents, rows = [], []
    for lengths in ROWS[:1] if one else ROWS:
        documents.append([torch.randint(3, 36, (max(n, LEAST.get(family, 1)),)) for n in lengths])
        rows.append(collate([{"input_ids": x.tolist()} for x in documents[-1]]))
    names = ("input_ids", "position_ids", "startend_row_indices")
    row = {name: torch.cat([x[name] for x in rows]) for name in names}
    return [x for own in documents for x in own], row, row["startend_row_indices"][:, 0, :, 0] > 0


def run(model, calls, real, mode, cached=False):
    """Return logits of real tokens and, in training, the gradient of every parameter, in float32 on the CPU."""
    options = {} if cached else {"use_cache": False}  # not every signature has it
    calls = [{name: x.to(model.device) for name, x in call.items()} | options for call in calls]
    case = model_zoo._Case(calls, real.to(model.device))
    return {name: x.float().cpu() for name, x in model_zoo._result(model, case, mode).items()}


def run_plain(family, calls, mode, monkeypatch):
    """Return what `run` does, of plain torch and eager attention in float32 on the CPU."""
    model = build(family, "eager", torch.float32, "cpu")
    code = sys.modules[type(model).__module__]
    real = torch.ones(1, sum(call["input_ids"].shape[-1] for call in calls)).bool()
    with monkeypatch.context() as patch:
        for name in PLAIN:
            if hasattr(code, name):
                patch.setattr(code, name, getattr(code, name).__wrapped__)
        return run(model, calls, real, mode)


def errors(got, want):
    """Return the error of logits, and of all gradients together, relative to their norm."""
    assert got.keys() == want.keys()
    logits = (got["logits"] - want["logits"]).norm() / want["logits"].norm()
    pairs = [(got[name] - x, x) for name, x in want.items() if name != "logits"]
    difference, whole = (torch.stack([x[i].norm() for x in pairs] or [torch.ones(())]).norm() for i in (0, 1))
    return logits.item(), (difference / whole).item() if pairs else 0.0


def measure(family, dtype, device, monkeypatch):
    """Return errors against each document alone in plain torch: of each alone with kernels, packed, and unguarded.

    Packed rows are called in three ways: in eval mode with mask vectors and the model's own cache, in training with
    mask vectors and without a cache (where one kernel does all of a layer), and in training with `position_ids` and the
    model's own cache.
    """
    documents, row, real = documents_and_rows(family)
    alone = [{"input_ids": x[None]} for x in documents]
    every = torch.ones(1, sum(len(x) for x in documents)).bool()
    told = {name: row[name] for name in ("input_ids", "position_ids")}
    want = {mode: run_plain(family, alone, mode, monkeypatch) for mode in ("eval", "training")}
    model = build(family, "flashmask", dtype, device)
    found = {
        "alone": errors(run(model, alone, every, "training"), want["training"]),
        "eval": errors(run(model, [row], real, "eval", cached=True), want["eval"]),
        "training": errors(run(model, [row], real, "training"), want["training"]),
        "cached training": errors(run(model, [told], real, "training", cached=True), want["training"]),
    }
    stock = build(family, "sdpa", dtype, device)  # separates documents in attention alone
    found["unguarded"] = errors(run(stock, [told], real, "training"), want["training"])
    return found


def check(found):
    """Assert that packing adds no error to that of the kernels, and that without boundaries it would."""
    bounds = [3 * x + 1e-6 for x in found["alone"]]
    for way in ("eval", "training", "cached training"):
        assert all(x <= bound for x, bound in zip(found[way], bounds, strict=True)), (way, found)
    assert all(x > 3 * bound for x, bound in zip(found["unguarded"], bounds, strict=True)), found


def dtypes(family):
    """Return the dtypes of a family: the kernels of the delta rule are for half precision."""
    delta = "flash-linear-attention" in families.FAMILIES[family].kernels
    return [torch.bfloat16] if delta else [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("family", "dtype"), [(family, dtype) for family in KERNELS for dtype in dtypes(family)])
def test_packed_rows_equal_each_document_alone(family, dtype, monkeypatch):
    """Logits and every gradient are as near to those of plain torch as when each document runs by itself."""
    require_kernels(family)
    check(measure(family, dtype, "cuda", monkeypatch))


@pytest.mark.parametrize(
    ("family", "way_out"),
    [("qwen3_5_text", "pass one row a batch"), ("lfm2", "pass no cache"), ("bamba", "pass no cache")]
    + [(x, "pass one document per row") for x in ("jamba", "kimi_linear", "lfm3", "mamba2", "minimax", "zaya")],
)
def test_what_kernels_cannot_serve_raises(family, way_out):
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {family}")
    if family in FIELDS:
        require_kernels(family)
    model = model_zoo.build(family, "flashmask", **FIELDS.get(family, {})).cuda()
    call = dict(
        input_ids=torch.randint(3, 36, (2, 6), device="cuda"),
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]], device="cuda").expand(2, -1),
    )
    if way_out == "pass no cache":
        call["past_key_values"] = model(input_ids=call["input_ids"], use_cache=True).past_key_values
    if family == "mamba2":
        del call["position_ids"]
        call["cu_seq_lens_q"] = torch.tensor([0, 3, 6], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=f"carry tokens from one document into the next; {way_out}"):
        model(**call)
