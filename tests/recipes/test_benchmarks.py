"""Every benchmark runs at a tiny size on a CPU, times nothing that is wrong, and writes the columns of its results."""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import tools.recipes  # noqa: F401  # makes the benchmarks importable
import torch
import torch.nn.functional as F
from tools.recipes import BENCHMARKS
from tools.support import FAMILIES
from tools.tiny import TRAINER_WARNINGS

from flashmask_hf import flashmask_attention, masks
from flashmask_hf._call.operators import plan_of

import attention  # isort: skip
import packed_attention  # isort: skip
import peers  # isort: skip

pytestmark = [
    *TRAINER_WARNINGS,
    pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning"),
]
CONDITIONS = ("gpu", "torch", "triton", "transformers", "flashmask_hf", "commit")


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a benchmark on the CPU and returns the rows of its CSV."""

    def run(name, *argv):
        file = tmp_path / f"{name}.csv"
        importlib.import_module(name).main([*map(str, argv), "--device", "cpu", "--csv", str(file)])
        with open(file, newline="") as opened:
            return list(csv.DictReader(opened))

    return run


def columns(name):
    """Return the columns of published results."""
    with open(BENCHMARKS / "results" / f"{name}.csv", newline="") as opened:
        return set(csv.DictReader(opened).fieldnames)


# ----- attention alone

STUDIES = {
    "masks": ["--lengths", 384, "--tokens", 768, "--dims", "16", "32/16", "--group", 2, "--hidden", 64],
    "sweep": ["--lengths", 384, "--tokens", 1, "--dims", 16, "--hidden", 16],
    "short": ["--lengths", 128, "--batches", 1, "--dims", 16],
    "decode": ["--lengths", 40, "--batches", 2],
    "plan": ["--lengths", 512],
    "sparse": ["--lengths", 128, "--hidden", 128],
    "dropout": ["--lengths", 256, "--tokens", 512, "--dims", 16, "--group", 2, "--hidden", 64],
}
RESULTS = {"short": "short_h200", "decode": "decode_h200", "plan": "plan_h200", "sparse": "sparse_attention_h200"}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_of_attention(study, run):
    rows = run("attention", study, *STUDIES[study], "--repeats", 1, "--warmup", 0)
    left_out = {"visible_pairs", "both_tflops_of_pairs", "issued_us", "bytes_per_token"}  # on no page
    assert columns(RESULTS.get(study, "attention_h200")) - left_out <= set(rows[0])
    if study == "plan":
        assert [(row["mask"], row["graph_us"]) for row in rows] == [(name, "") for name in attention.FAMILIES]
        return
    names = [name for name in attention.STUDIES[study].providers if name.startswith(("flashmask", "hash", "drop"))]
    own = [row for row in rows if row["provider"] in names and row["provider"] != "flashmask_triton"]
    assert {row["provider"] for row in own} == set(names) - {"flashmask_triton"}
    assert {row["status"] for row in own} == {"timed"}
    others = {row["status"].partition(":")[0] for row in rows}
    assert others <= {"timed", "cannot", "failed", "not installed"}
    if study in ("short", "decode"):
        assert all(float(row["host_us"]) > 0 for row in own)
        dense = [row for row in rows if row["provider"] == "sdpa_dense"]
        assert {row["status"] for row in dense} == {"timed"}


@pytest.mark.parametrize("title", attention.RAGGED)
def test_a_case_of_uneven_work_is_what_its_name_says(title):
    (_, function), given, heads, kv_heads, dim = attention.RAGGED[title]
    mask = function(*given)
    rows, keys, group = mask.row_count(), mask.kv_len, title.split()[0]
    assert dim == (64 if "head_dim 64" in title else 128)
    expected = {
        "short": rows == keys == 32768 and mask.sparsity() > 0.95,
        "grouped": heads == 8 * kv_heads and keys <= 8192,
        "few": heads == int(title.split()[1]) if group == "few" else False,
        "chunk": {rows, keys} == {1024, 16384},
        "across": {rows, keys} == {1024, 16384} and not mask.causal,
        "odd": bool(keys % 128) and str(keys) in title,
    }
    assert expected[group]


def test_a_mask_of_ones_own(run, tmp_path):
    (tmp_path / "own.py").write_text(
        "from flashmask_hf import masks\ndef mine(length):\n    return masks.sliding_window(length, 9)\n"
    )
    flags = ["--mask", f"{tmp_path / 'own.py'}:mine", "--providers", "flashmask", "--repeats", 1]
    (row,) = run("attention", *flags, "--lengths", 200, "--tokens", 1, "--dims", 16, "--hidden", 16)
    assert (row["mask"], row["status"]) == ("mine", "timed")
    del attention.FAMILIES["mine"]


def test_work_is_counted_on_visible_tiles_and_pairs():
    forward, backward = attention.Shape(2, 4, 2, 8, 16, 16).flops(64)
    assert (forward, backward) == (4 * 2 * 4 * 64 * 16, 10 * 2 * 4 * 64 * 16)
    forward, backward = attention.Shape(1, 1, 1, 8, 16, 8).flops(1)
    assert (forward, backward) == (2 * (16 + 8), 2 * (3 * 16 + 2 * 8))


@pytest.mark.parametrize(("length", "q_len"), [(50, 50), (50, 23), (23, 50)])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_exact_results_are_those_of_the_reference(heads, length, q_len, monkeypatch):
    monkeypatch.setattr(attention, "EXACT_ROWS", 16)  # several parts, the last one shorter
    torch.manual_seed(0)
    shape = attention.Shape(2, *heads, length, 16, 16)
    mask, tensors = masks.full(length, q_len=q_len), attention.inputs(shape, q_len, "cpu")
    if q_len <= length:
        mask = masks.causal(length, q_len=q_len)
    wide = [x.detach().double().requires_grad_() for x in tensors[:3]]
    out = flashmask_attention(*wide, mask, impl="reference")
    expected = [out.detach(), *torch.autograd.grad(out, wide, tensors[3].double())]
    found = attention.exact(peers.Case("", mask, *tensors[:3]), tensors[3])
    for one, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.cat(attention.corners(whole, heads[1])), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q_len", [29, 61])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_peers_mean_what_the_mask_means(family, q_len):
    mask = FAMILIES[family](61, q_len)
    mask = peers.FlashMask(mask.indices[:1, :1], mask.causal, q_len=mask.q_len)
    dense, rows, keys = mask.to_dense()[0, 0], torch.arange(mask.row_count())[:, None], torch.arange(61)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(peers.visible_pairs(mask)(zero, zero, rows, keys), dense)
    bounds = peers.row_bounds(mask, 2)
    assert torch.equal(seen_by(bounds, 61), torch.cat([dense, dense]))
    if q_len == 61:
        assert torch.equal(packed_attention.dense_mask(mask)[0, 0], dense)


def seen_by(bounds, keys):
    """Return which keys the row intervals of cudnn.flex_attention show to each row."""
    key = torch.arange(keys)
    visible = key < bounds[0, :, None]
    for start, end in zip(bounds[1::2], bounds[2::2], strict=True):
        visible |= (key >= start[:, None]) & (key < end[:, None])
    return visible


def test_a_planned_call_is_the_public_one():
    tensors = attention.inputs(attention.Shape(2, 4, 2, 200, 16, 16), 200, "cpu")
    case = peers.Case("causal", masks.causal(200), *tensors[:3])
    attend = peers.planned("flashmask", case)
    for one, other in zip(*(attention.results_of(x, tensors) for x in (
        attend, lambda q, k, v: flashmask_attention(q, k, v, case.mask))), strict=True):  # fmt: skip
        assert torch.equal(one, other)
    assert peers.planned("sdpa", case) is None


def test_masks_of_heads_are_left_out_by_peers_that_have_one():
    mask = attention.make_mask("window_per_head", 1300, 4)
    assert mask.indices.shape[1] == 4
    with pytest.raises(peers.CannotExpress, match="same for all rows and all heads"):
        peers.PROVIDERS["flex_attention"].prepare(peers.Case("", mask, *[torch.empty(0)] * 3))


def sdpa(q, k, v, visible):
    """Attend on [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True).transpose(1, 2)


def flash_attn_func(q, k, v, *, causal, window_size=(None, None)):
    """Do what FlashAttention-4 says of its arguments, aligned at the bottom right."""
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    visible = (distance <= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    if window_size[0] is not None:
        visible &= distance >= -window_size[0]
    return sdpa(q, k, v, visible), None


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    """Do what FlashAttention-4 says of its arguments: sequences of [total, H, D] that see only themselves."""
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) == max_seqlen_q == max_seqlen_k
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([flash_attn_func(*(x[None] for x in part), causal=causal)[0][0] for part in parts]), None


def create_mask_plan(bounds, q, k, v):
    """Do what cudnn.flex_attention says of its arguments; the plan is the dense mask of every batch entry."""
    assert bounds.dtype == torch.int32
    return torch.stack([seen_by(part, k.shape[1]) for part in bounds[0].split(q.shape[1], 1)])[:, None]


def flex_attn_func(q, k, v, *, mask_plan):
    """Attend under a plan of `create_mask_plan`."""
    return sdpa(q, k, v, mask_plan)


@pytest.fixture
def packages(monkeypatch):
    """Put modules in the place of flash-attn-4 and cudnn that do on a CPU what these say of their arguments."""
    functions = {
        "flash_attn": (),
        "flash_attn.cute": (flash_attn_func, flash_attn_varlen_func),
        "cudnn": (),
        "cudnn.flex_attention": (create_mask_plan, flex_attn_func),
    }
    for name, members in functions.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        for member in members:
            setattr(module, member.__name__, member)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda package: f"of {package}")


@pytest.mark.usefixtures("packages")
def test_peers_get_the_masks_that_they_can_express(run):
    names = ["flashmask", "fa4", "cudnn_flex", "sdpa_dense"]
    families = ["full", "causal", "sliding_window", "causal_document", "document", "share_question", "random_eviction"]
    flags = ["--repeats", 1, "--warmup", 0, "--masks", *families, "--providers", *names]
    rows = run("attention", *STUDIES["masks"], *flags)
    assert len(rows) == 2 * len(families) * len(names)
    for row in rows:
        known = row["mask"] in families[:5]
        expected = "timed" if row["provider"] != "fa4" or known else "cannot"
        assert row["status"].partition(":")[0] == expected, (row["mask"], row["provider"], row["status"])
    assert {row["version"] for row in rows if row["provider"] == "fa4"} == {"", "flash-attn-4 of flash-attn-4"}


def test_providers_that_are_wrong_fail_or_are_missing_are_not_timed(run, monkeypatch):
    right = peers.PROVIDERS["sdpa_dense"]

    def leaks(case):
        """Attend under a mask whose last row sees what it should not."""
        return right.prepare(case._replace(mask=masks.full(case.mask.kv_len)))

    def last_head(case):
        """Return an output that is too large in the last head."""
        factor = torch.ones(case.q.shape[1], 1, 1, dtype=torch.bfloat16)
        factor[-1] = 1.1
        return lambda: lambda q, k, v: right.prepare(case)()(q, k, v) * factor

    def raises(case):
        raise RuntimeError("no kernel\nfor this width")

    wrong = {"sdpa": leaks, "flashmask": last_head, "cudnn": raises}
    for name, prepare in wrong.items():
        monkeypatch.setitem(peers.PROVIDERS, name, peers.Provider(prepare))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    flags = ["--lengths", 256, "--tokens", 1, "--dims", 16, "--hidden", 48, "--masks", "causal", "--repeats", 1]
    rows = run("attention", *flags, "--providers", *wrong, "sdpa_dense", "fa4")
    status = {row["provider"]: row["status"] for row in rows}
    assert status["sdpa"].startswith("differs: out by ")
    assert all(f"{what} by" in status["sdpa"] for what in ("dq", "dk", "dv"))
    assert status["flashmask"].startswith("differs: out by 1.0e-01")
    assert status["cudnn"] == "failed: RuntimeError: no kernel for this width"
    assert (status["sdpa_dense"], status["fa4"]) == ("timed", "not installed")
    assert not any(row["forward_ms"] for row in rows if row["status"] != "timed")


# ----- training

TINY = ["--shapes", "tiny", "--steps", 1]


@pytest.mark.parametrize(
    ("tasks", "lengths", "implementations"),
    [
        (["lora"], ["256", "128"], ["flashmask", "sdpa"]),
        pytest.param(["sft", "dpo", "reward"], ["1024", "512"], ["flashmask", "sdpa", "trl_sdpa", "trl_sdpa_single"],
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_training(tasks, lengths, implementations, run):
    flags = ["--tasks", *tasks, "--implementations", *implementations, "--settings", "eager", "kept"]
    rows = run("training", *TINY, "--lengths", *lengths, *flags)
    assert columns("row_lengths_1b_h200") <= set(rows[0])
    for task in tasks:
        ran = implementations if task in ("dpo", "reward") else implementations[:2]
        own = [row for row in rows if row["task"] == task]
        found = [(row["length"], row["setting"], row["implementation"]) for row in own]
        once = [*(("eager", name) for name in ran), ("kept", "flashmask")]
        assert found == [(length, *pair) for length in lengths[::-1] for pair in once]
        assert all(int(row["tokens_per_second"]) > 0 and row["steps"] == "1" for row in own)


@pytest.mark.full
def test_training_on_preferences(run, monkeypatch):
    """With and without shared prefixes losses and gradients agree, or the program exits."""
    import training

    monkeypatch.setattr(training, "PROMPT", 64)
    names = ["flashmask", "trl_flashmask", "trl_sdpa"]
    rows = run("training", "preference", *TINY, "--lengths", 220, "--implementations", *names)
    assert [(row["task"], row["implementation"]) for row in rows] == [(x, y) for x in ("orpo", "kto") for y in names]
    assert [bool(row["hook_milliseconds"]) for row in rows] == [True, False, False] * 2
    assert all(int(row["tokens_per_second"]) > 0 for row in rows)


@pytest.mark.full
def test_training_of_block_diffusion(run, monkeypatch):
    """The packed row and dllm's padded batches have one loss, or the program exits."""
    import block_diffusion

    monkeypatch.setattr(block_diffusion, "MEAN", 128)
    monkeypatch.setattr(block_diffusion, "SHORTEST", 32)
    monkeypatch.setattr(block_diffusion, "BATCH_SIZE", 2)
    rows = run("training", "diffusion", *TINY, "--lengths", 768, 1024)
    assert [(row["length"], row["implementation"]) for row in rows] == [
        (length, name) for length in ("768", "1024") for name in ("flashmask", "dllm_sdpa")
    ]
    assert all(int(row["tokens_per_second"]) > 0 for row in rows)


@pytest.mark.full
def test_training_on_trajectories(run):
    """With and without shared prefixes losses and gradients agree, or the program exits."""
    rows = run("training", "trajectories", *TINY, "--lengths", 128, "--implementations", "flashmask", "trl_flashmask")
    assert [row["implementation"] for row in rows] == ["flashmask", "trl_flashmask"]
    assert int(rows[0]["rows"]) * 2 < int(rows[1]["rows"]) < int(rows[0]["examples"]) == int(rows[1]["examples"])
    assert all(float(row["examples_per_second"]) > 0 for row in rows)


@pytest.fixture
def training(monkeypatch):
    """The benchmark, whose fine-tuning takes no time, and in which SDPA's memory ends at 512 tokens."""
    import training

    def fake(self, implementation, row):
        taken.append((implementation, row["input_ids"].shape[1]))
        if implementation == "sdpa" and taken[-1][1] > 512:
            raise torch.OutOfMemoryError("out")
        return losses.get(implementation, 1.0)

    taken, losses = [], {}
    monkeypatch.setattr(training.FineTuning, "run", fake)
    return training, taken, losses


@pytest.mark.full
@pytest.mark.parametrize("shape", ["qwen2.5-vl-tiny", "gemma-3-tiny"])
def test_training_with_images(shape, run, monkeypatch):
    """The packed row, the padded batches and the single conversations have one loss, or the program exits."""
    import images

    monkeypatch.setattr(images, "SIDES", (2, 6))
    peers = ["trl_sdpa", "trl_sdpa_single"]
    flags = ["--tasks", "images_50", "--implementations", "flashmask", "sdpa", *peers, "--lengths", 1024]
    rows = run("training", "images", "--shapes", shape, "--steps", 1, *flags)
    assert [row["implementation"] for row in rows] == ["flashmask", *peers]
    assert all(float(row["images_per_second"]) > 0 for row in rows)


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_conversations_fill_a_row(share):
    import images

    drawn = images.draw(65536, share, (8, 32), torch.Generator().manual_seed(0))
    lengths = [text + sum(height * width for height, width in sizes) for text, sizes in drawn]
    tokens = sum(lengths) - sum(text for text, _ in drawn)
    assert sum(lengths) == 65536
    assert min(lengths) >= images.SHORTEST
    assert tokens / 65536 == pytest.approx(share, abs=0.05)
    assert all(len(sizes) < text for text, sizes in drawn)


def test_out_of_memory_ends_one_series(training, run):
    flags = ["--tasks", "sft", "--implementations", "flashmask", "sdpa", "--lengths", 256, 512, 1024, 2048]
    rows = run("training", *TINY, *flags)
    assert [row["tokens_per_second"] for row in rows if row["implementation"] == "sdpa"][2:] == ["out of memory"]
    assert [row["length"] for row in rows if row["implementation"] == "flashmask"] == ["256", "512", "1024", "2048"]
    assert training[1].count(("sdpa", 1024)) == 1


def test_the_study_of_settings_has_every_cell(training, run, monkeypatch):
    monkeypatch.setattr(training[0], "apply_liger_kernel", lambda model, options: None)
    rows = run("training", "settings", *TINY, "--lengths", 256, "--implementations", "flashmask", "sdpa")
    cells = [(row["task"], row["setting"], row["implementation"]) for row in rows]
    alone, shared = ("kept", "kept+liger", "compiled+kept"), ("eager", "liger", "compiled")
    expected = [("sft", setting, name) for setting in shared for name in ("flashmask", "sdpa")]
    assert sorted(cells) == sorted([*expected, *(("sft", setting, "flashmask") for setting in alone)])
    assert all(int(row["tokens_per_second"]) > 0 for row in rows)


def test_rows_carry_the_same_mask_in_every_form():
    import training

    row = training.make_rows(300, 1, 64, "cpu")[0]
    dense = peers.FlashMask(row["startend_row_indices"], causal=True).to_dense()
    assert torch.equal(training.inputs("sdpa", row)["attention_mask"], dense)
    bounds = training.inputs("flash_attention_4", row)["cu_seq_lens_q"]
    documents = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    assert torch.equal(documents[:, None] == documents, (dense | dense.mT)[0, 0])


def test_a_series_ends_before_a_step_that_takes_too_long(training, run):
    flags = ["--tasks", "sft", "--implementations", "flashmask", "--lengths", 256, 512, "--longest", 0]
    assert [row["tokens_per_second"] for row in run("training", *TINY, *flags)][1:] == ["out of time"]


@pytest.mark.parametrize(
    ("calls", "steps", "measured", "late"),
    [
        (5, "1", 1, ["256", "512"]),
        (6, "1", 2, ["512", "512"]),
        (7, "2", 2, ["512"]),
    ],  # two of the check, two that warm up, then turns of two
)
def test_what_was_measured_before_the_deadline_is_written(calls, steps, measured, late, training, run, monkeypatch):
    import harness

    taken = training[1]
    monkeypatch.setattr(harness, "time_left", lambda a: 1e6 if len(taken) < calls else -1.0)
    flags = ["--shapes", "tiny", "--tasks", "sft", "--implementations", "flashmask", "sdpa", "--steps", 3]
    rows = run("training", *flags, "--lengths", 256, 512)
    assert len(taken) == calls
    figures = [row for row in rows if row["tokens_per_second"] != "out of time"]
    assert [row["length"] for row in rows if row not in figures] == late
    assert [row["length"] for row in figures] == ["256"] * measured
    assert max(row["steps"] for row in figures) == steps


def test_implementations_that_disagree_are_not_timed(training, run):
    training[2]["sdpa"] = 1.1
    with pytest.raises(SystemExit, match="the implementations disagree"):
        run("training", *TINY, "--tasks", "sft", "--implementations", "flashmask", "sdpa", "--lengths", 256)


def test_settings_are_put_in_and_taken_out(monkeypatch):
    import training

    def liger(model, options):
        model.model.norm.forward = "liger"

    monkeypatch.setattr(training, "apply_liger_kernel", liger)
    model = training.build_model("tiny", "cpu")
    switch = training.Switch([model], ["eager", "liger", "compiled+kept"])
    layer, norm = model.model.layers[0], vars(model.model.norm)

    def state(setting):
        switch.set(setting)
        options = layer._gradient_checkpointing_func.keywords
        return norm.get("forward"), layer._compiled_call_impl is not None, "context_fn" in options

    assert state("liger") == ("liger", False, False)
    assert state("compiled+kept") == (None, True, True)
    assert state("eager") == (None, False, False)
    assert training.setting("kept+compiled") == "compiled+kept"
    assert training.setting("eager") == "eager"


def test_the_profile_of_a_step(run):
    rows = run("step_profile", "--shape", "tiny", "--lengths", 256, "--settings", "eager")
    assert columns("step_profile_1b_h200") == set(rows[0])
    kinds = {row["kind"]: float(row["share"]) for row in rows}
    assert {"matrix products", "norms", "rotary", "activation", "loss", "optimizer"} <= set(kinds)
    assert sum(kinds.values()) == pytest.approx(1, abs=0.01)


KERNELS = {
    "void cutlass::Kernel2<sm90_xmma_gemm_bf16>": "matrix products",
    "nvjet_tst_128x256": "matrix products",
    "_forward_kernel": "loss",
    "forward_kernel": "attention forward",
    "scale_dq_kernel": "attention backward",
    "_column_plan": "plan and mask",
    "triton_red_fused_mean_pow_rsqrt_3": "norms",
    "triton_poi_fused_mul_silu_1": "activation",
    "triton_poi_fused_cat_mul_neg_2": "rotary",
    "Memcpy DtoD (Device -> Device)": "copies and casts",
    "multi_tensor_apply_kernel": "optimizer",
    "elementwise_kernel": "unclassified",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_have_kinds(kernel):
    import step_profile

    assert step_profile.kind_of(kernel) == KERNELS[kernel]


IMAGE_MODELS = [pytest.param(f"{name}-tiny", marks=pytest.mark.full) for name in ("qwen2.5-vl", "gemma-3")]


@pytest.mark.parametrize("model", ["tiny", *IMAGE_MODELS])
def test_grpo(model, run, capsys):
    flags = ["--models", model, "--cases", "32:8", "--turns", 1, "--generations", 4, "--groups", 1, 2]
    rows = run("reinforcement", *flags, "--deadline", 1e6)
    left_out = {"compiled", "lora", "update_against_sdpa", "first_ratio_max", "first_ratio_mean"}  # on no page
    assert columns("grpo_1b_h200") - left_out == set(rows[0])
    providers = ["flashmask", "sdpa"]
    assert [(row["groups"], row["provider"]) for row in rows] == [(n, name) for n in "12" for name in providers]
    for row in rows:
        assert int(row["update_tokens_per_second"]) > 0
        assert float(row["difference"]) < 1e-5 < 0.02 < float(row["other_prompt"])
    assert "flex_attention is left out: it has no backward on a CPU" in capsys.readouterr().out


def test_embeddings(run, monkeypatch):
    """Also where a provider is wrong."""
    import embeddings

    flags = ["--pairs", 3, "--query", 16, "--document", 4, "--images", 2, "--turns", 1, "--deadline", 1e6]
    shapes, cases = ["bert-tiny", "tiny", "qwen2.5-vl-tiny"], ["sentences", "rerank", "tower"]
    rows = run("embeddings", "--shapes", *shapes, "--cases", *cases, *flags)
    cases = [("bert-tiny", "sentences"), ("tiny", "sentences"), ("tiny", "rerank"), ("qwen2.5-vl-tiny", "tower")]
    found = [(row["shape"], row["case"], row["provider"]) for row in rows]
    assert found == [(*case, provider) for case in cases for provider in ("flashmask", "sdpa")]
    assert all(float(row["difference"]) < 1e-5 and float(row["tokens_per_second"]) > 0 for row in rows)
    correct = embeddings.Reranker.outputs
    shifted = lambda self, name: correct(self, name).roll(int(name == "sdpa"), 0)  # noqa: E731
    monkeypatch.setattr(embeddings.Reranker, "outputs", shifted)
    with pytest.raises(SystemExit, match="the outputs of the providers disagree"):
        run("embeddings", "--shapes", "tiny", "--cases", "rerank_scores", *flags)


def test_a_provider_of_grpo_that_is_wrong_ends_the_run(run, monkeypatch):
    import reinforcement

    correct = reinforcement.Bench.log_probabilities

    def without_prompts(self, provider, batch):
        if provider == "flashmask":
            batch = batch | {"prompt_ids": torch.full_like(batch["prompt_ids"], 3)}
        return correct(self, provider, batch)

    monkeypatch.setattr(reinforcement.Bench, "log_probabilities", without_prompts)
    with pytest.raises(SystemExit, match="flashmask and sdpa disagree"):
        run("reinforcement", "--models", "tiny", "--cases", "16:8", "--providers", "sdpa", "flashmask")


def test_long_rows(run):
    flags = ["--shape", "tiny", "--documents", 3, "--equal", "--keep_attention", 1, "--host_gib", 1]
    rows = run("long_rows", "--tokens", 600, 500, *flags)
    assert columns("long_rows_h200") == set(rows[0])
    assert [row["tokens"] for row in rows] == ["600", "500"]
    assert {(row["attention"], row["documents"]) for row in rows} == {("kept", "3 equal")}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_drafts(run, monkeypatch):
    """Both ways have one sum, or the mask of one is wrong. FlexAttention has no backward on a CPU."""
    import drafts

    monkeypatch.setattr(drafts, "_blocks", drafts.create_block_mask)
    monkeypatch.setattr(drafts, "_flex", drafts.flex_attention)
    rows = run("drafts", "--lengths", 64, "--blocks", 4, "--repeats", 1, "--providers", "flashmask")
    assert [(row["task"], row["status"]) for row in rows] == [("eagle3", "timed"), ("dflash", "timed")]
    case = drafts.Case([100, 60, 40], [3, 99, 100, 180], torch.arange(3).repeat_interleave(torch.tensor([100, 60, 40])))
    for task, ways in drafts.TASKS.items():
        tensors = [x.detach() for x in drafts.tensors_of(task, 200, argparse.Namespace(device="cpu", blocks=4))]
        one, other = (way(case, tensors).item() for way in ways.values())
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("task", ["sft", "lora", "dpo", "reward"])
def test_curves_agree(task, run, monkeypatch):
    import convergence

    few = convergence.dataset_of(task).select(range(40))
    monkeypatch.setattr(convergence, "dataset_of", lambda task: few)
    monkeypatch.setattr(convergence, "faults_of", lambda curves, steps: [])  # of curves long enough to fall
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = run("convergence", "--tasks", task, "--seeds", 1, "--steps", 4)
    assert columns("convergence_cpu") == set(rows[0])
    curves = {name: [row[name] for row in rows] for name in convergence.CURVES if rows[0][name]}
    assert curves["flashmask"] == curves["flashmask_again"] == curves["flashmask_unskipped"]
    assert ("trl" in curves) == (task in ("dpo", "reward"))
    for losses in curves.values():
        assert [float(x) for x in losses] == pytest.approx([float(x) for x in curves["flashmask"]], abs=1e-3)


def test_what_differs_between_curves_is_a_fault():
    import convergence

    falling, other = [3.0, 2.0, 1.0], [3.0, 2.0, 1.0000001]
    good = dict.fromkeys(("flashmask", "flashmask_again", "flashmask_unskipped", "sdpa", "trl"), falling)
    assert not list(convergence.faults_of(good, 3))
    faults = {
        "flashmask_again differs from flashmask from step 3 on": {"flashmask_again": other},
        "sdpa differs from flashmask by up to 2.0e-02 in 50 steps, more than 0.001": {"sdpa": [3.0, 2.0, 1.02]},
        "trl has 1 steps, not 3": {"trl": [3.0]},
    }
    for fault, curve in faults.items():
        assert list(convergence.faults_of(good | curve, 3)) == [fault]
    rising = {name: [1.0, 2.0, 1.0] for name in good}
    assert len(list(convergence.faults_of(rising, 3))) == len(good)


def test_dense_attention_takes_the_place_of_flashmask():
    import training

    model, (row,) = training.build_model("tiny", "cpu"), training.make_rows(300, 1, 64, "cpu")
    logits = []
    for name in ("flashmask", "sdpa"):
        with packed_attention.attention(name), torch.no_grad():
            logits.append(model(**row).logits)
    assert not torch.equal(*logits)
    torch.testing.assert_close(*logits)


def test_calls_in_turns_fail_alone_and_end_by_the_deadline(monkeypatch):
    import harness

    def fails():
        raise torch.OutOfMemoryError("out")

    calls, compared = {"fails": fails, "runs": lambda: 1}, []
    for left, turns in ((1e6, 3), (1e-9, 1)):  # less than a turn takes
        monkeypatch.setattr(harness, "time_left", lambda a, left=left: left)
        found = harness.contest(calls, lambda results: compared.append(dict(results)), 3, argparse.Namespace())
        assert (found["fails"], found["runs"].turns) == ("out of memory", turns)
    assert compared == [{"runs": 1}] * 2


def test_providers_without_a_step_before_the_deadline_are_left_out(tmp_path, capsys, monkeypatch):
    """Then there may be no row to write. A turn takes four times as long at twice the length."""
    import harness
    import parallel

    late = argparse.Namespace(providers=["whole", "keys"], warmup=0, repeats=1)
    row, bench = {parallel.VECTORS: torch.zeros(1, 1, 128, 2)}, object.__new__(parallel.Bench)
    bench.turn = 64, 1.0
    monkeypatch.setattr(harness, "time_left", lambda a: 3.9)
    harness.Results(tmp_path / "rows.csv").add(bench.measure(row, late))
    assert not (tmp_path / "rows.csv").exists()
    says = [f"{name} is left out: no step before the deadline" for name in late.providers]
    assert capsys.readouterr().out.splitlines() == says


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("attention --repeats 0", "argument --repeats: must be at least 1, got 0"),
        ("training --steps -1", "argument --steps: must be at least 1, got -1"),
        ("training --longest nan", "argument --longest: must be at least 0, got nan"),
        ("training --settings fast", "argument --settings: must be some of eager, kept, liger, compiled, joined by +"),
        ("parallel --warmup -1", "argument --warmup: must be at least 0, got -1"),
        ("reinforcement --cases 512", "argument --cases: must be PROMPT:COMPLETION, such as 512:256, got 512"),
    ],
)
def test_wrong_flags_are_named_before_anything_is_measured(command, message, capsys):
    program, *flags = command.split()
    with pytest.raises(SystemExit):
        importlib.import_module(program).main([*flags, "--device", "cpu"])
    assert message in capsys.readouterr().err


def test_programs_take_the_commands_of_pages(monkeypatch):
    import harness

    def parsed(path):
        raise InterruptedError

    monkeypatch.setattr(harness, "Results", parsed)
    names = {"SHAPE": "tiny", "MODEL": "tiny", "TASK": "dpo", "NAMES": "sdpa", "MASKS": "causal", "P:C": "8:8"}
    text = "".join(page.read_text() for page in (TESTS.parent / "docs").glob("*.md"))
    for program, flags in re.findall(r"`[^`]*recipes/benchmarks/(\w+)\.py([^`]*)`", text):
        given = [names.get(word, "8" if word.isupper() else word) for word in flags.split()]
        with pytest.raises(InterruptedError):
            importlib.import_module(program).main([*given, "--device", "cpu"])


def test_unskipped_lists_every_tile():
    def listed(name):
        with packed_attention.attention(name):
            return int(plan_of(masks.causal_document([200, 300, 140]), 640).counts.sum())

    assert listed("flashmask_unskipped") == 5 * 5
    assert listed("flashmask_portable") == listed("flashmask") < 15


# ----- processes


@pytest.mark.full
def test_packing(run):
    rows = run("packing", "--documents", 50)
    assert columns("packing_cpu") == set(rows[0])
    assert [row["packer"] for row in rows][:2] == ["TRL bfd", "pack_dataset"]
    assert all(0.5 < float(row["efficiency"]) <= 1 for row in rows)


TESTS = Path(__file__).parents[1]


def run_over_two_processes(file, program, *flags):
    """Run a program of `accelerate_fsdp2_cp.yaml` in two processes on the CPU; return its rows and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [TESTS / "tools" / "fsdp_on_cpu.py", BENCHMARKS / program, "--device", "cpu"]
    command += ["--shape", "tiny", "--tokens", 512, "--csv", file, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened)), done.stdout


@pytest.mark.full
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_rows_over_several_processes(tmp_path, task):
    rows, printed = run_over_two_processes(tmp_path / "rows.csv", "parallel.py", "--task", task, "--repeats", 1)
    assert "sdpa_cp is left out" in printed  # torch has no context parallelism on a CPU
    assert columns("parallel_h200") == set(rows[0])
    assert [row["provider"] for row in rows] == ["heads", "keys", "whole"]
    losses = [float(row["loss"]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-5)


@pytest.mark.full
def test_long_rows_over_several_processes(tmp_path):
    flags = ["--documents", 3, "--keep_attention", 1, "--host_gib", 1]
    (row,), _ = run_over_two_processes(tmp_path / "rows.csv", "long_rows.py", *flags)
    assert columns("long_rows_h200") == set(row)
    assert (row["gpus"], row["attention"], row["host_gib"]) == ("2", "kept", "1.0")


@pytest.mark.full
def test_the_first_call(run):
    rows = run("first", "call", "--warm", 1)
    assert columns("first_call_h200") == set(rows[0])
    assert [row["cache"] for row in rows] == ["empty", "full"]


DEMO = r"""
import sys, time
say = lambda text: (sys.stderr.write(text), sys.stderr.flush(), time.sleep(0.2))
say("Successfully installed pip-26.0\n")
say("Successfully installed flashmask-hf-0.1.0 torch-2.13.0\n")
say("\rTokenizing train dataset: 100%|####| 24/24 [00:00<00:00]\n")
say("\r  0%|          | 0/286 [00:00<?, ?it/s]")
say("\r  0%|          | 1/286 [00:00<01:20,  3.56it/s]")
say("\nPicture of the loss and of the mask of one row: picture.png\n" if sys.argv[1] == "all" else "\nno\n")
"""


def test_stages_of_the_demo_are_timed_when_they_are_printed(tmp_path):
    import first

    found = first.passed([sys.executable, "-c", DEMO, "all"], tmp_path)
    installed, stepped, answered = found.values()
    assert list(found) == ["environment installed", "first training step", "trained and answered"]
    assert 0.1 < installed < stepped - 0.5
    assert 0.1 < answered - stepped < 0.5
    with pytest.raises(RuntimeError, match="did not pass all stages"):
        first.passed([sys.executable, "-c", DEMO, "part"], tmp_path)


def test_results_name_the_machine_and_the_versions(monkeypatch):
    import harness

    monkeypatch.setenv("COMMIT", "1234567")
    assert harness.conditions()["commit"] == "1234567"
    for file in sorted((BENCHMARKS / "results").glob("*.csv")):
        found = columns(file.stem)
        assert set(CONDITIONS) <= found or file.stem == "first_step_cpu", file.name
