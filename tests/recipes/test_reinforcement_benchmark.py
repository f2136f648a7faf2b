"""The benchmark of GRPO runs on a CPU: every provider agrees, writes its figures, and the chart is drawn."""

import csv
import importlib
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from tools.recipes import RECIPES
from tools.tiny import TRAINER_WARNINGS

BENCHMARKS = RECIPES / "benchmarks"

pytestmark = [
    *TRAINER_WARNINGS,
    pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning"),
]


def varlen_attention(query, key, value, starts_q, starts_k, max_q, max_k, softmax_scale, causal, window_size):
    """FlashAttention 3's attention of sequences end to end, aligned at the bottom right."""
    parts = []
    for (q0, q1), (k0, k1) in zip(starts_q.unfold(0, 2, 1).tolist(), starts_k.unfold(0, 2, 1).tolist(), strict=True):
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - q1 + q0)
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(parts)


def run(monkeypatch, name, *arguments):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(BENCHMARKS / name), run_name="__main__")


def test_providers_agree_and_the_chart_is_drawn(monkeypatch, tmp_path, capsys):
    from trl.experimental.async_grpo import packing

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention))
    file = tmp_path / "grpo.csv"
    flags = ("--models", "tiny", "--device", "cpu", "--turns", 1, "--generations", 4, "--groups", 1, 2)
    run(monkeypatch, "reinforcement.py", *flags, "--csv", file)
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    providers = ["flashmask", "flashmask_unshared", "sdpa", "tree_fa3"]
    cases = [(*case, groups) for case in (("64", "16"), ("16", "32")) for groups in ("1", "2")]
    found = [(row["prompt"], row["completion"], row["groups"], row["provider"]) for row in rows]
    assert found == [(*case, name) for case in cases for name in providers]
    for row in rows:
        least = int(row["groups"]) * 4 * (int(row["prompt"]) + int(row["completion"]) // 2)
        assert least <= int(row["tokens"]) <= int(row["groups"]) * 4 * (int(row["prompt"]) + int(row["completion"]))
        assert (row["generations"], row["compiled"]) == ("4", "off")
        assert int(row["update_tokens_per_second"]) > 0
        assert int(row["forward_tokens_per_second"]) > 0
        assert float(row["difference"]) < 1e-5 < 0.1 < float(row["other_prompt"])
        if row["provider"] in ("flashmask", "sdpa"):
            assert float(row["first_ratio_max"]) < 1e-4
    assert "flex_attention is left out: it has no backward on a CPU" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    run(monkeypatch, "plots.py", "--grpo", file, "--out", tmp_path)
    assert (tmp_path / "grpo_tiny.png").stat().st_size > 10_000


@pytest.fixture
def reinforcement(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("reinforcement")


def test_every_provider_runs_a_micro_batch_in_one_forward(reinforcement):
    """As TRL does: padded with a row for each completion, or packed with each prompt of the micro-batch once."""
    bench = reinforcement.Bench("tiny", 0, SimpleNamespace(device="cpu", generations=3, micro_batches=2))
    shapes = []
    bench.model.model.layers[0].register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    batch = bench.draw(16, 8, 2)
    completions = int(batch["completion_mask"].sum())
    for name, shape in (("sdpa", (6, 24)), ("flashmask", (1, 2 * 16 + completions))):
        bench.update(name, batch)
        assert shapes == [shape]
        shapes.clear()
    bench.first_ratio("sdpa", 16, 8, 2)
    assert shapes == [(6, 24)] * 4  # two micro-batches before the update, and in it
    shapes.clear()
    bench.first_ratio("flashmask", 16, 8, 2)
    assert len(shapes) == 4
    assert shapes[:2] == shapes[2:]
    assert sum(length for _, length in shapes[:2]) == 4 * 16 + int(bench.draw(16, 8, 4)["completion_mask"].sum())


@pytest.mark.full
def test_compiled_layers_give_the_same(reinforcement, monkeypatch, tmp_path):
    """Each layer is compiled for all providers, which must agree as they do without."""
    compile_module = torch.nn.Module.compile
    compiled = []

    def compile_eagerly(module, *args, **kwargs):
        compiled.append(type(module).__name__)
        compile_module(module, *args, **kwargs | {"backend": "eager"})

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    file = tmp_path / "grpo.csv"
    flags = ("--compile", "--providers", "flashmask", "sdpa", "--cases", "16:8", "--turns", "1", "--csv", str(file))
    monkeypatch.setattr(sys, "argv", ["reinforcement.py", "--models", "tiny", "--device", "cpu", *flags])
    torch.compiler.reset()
    reinforcement.main()
    torch.compiler.reset()
    assert compiled == ["LlamaDecoderLayer"] * 2
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [(row["provider"], row["compiled"]) for row in rows] == [("flashmask", "on"), ("sdpa", "on")]
    assert all(float(row["difference"]) < 1e-5 for row in rows)


def test_a_wrong_provider_ends_the_run(reinforcement, monkeypatch):
    correct = reinforcement.call_unshared

    def without_prompts(model, keep, input_ids, attention_mask, labels, **kwargs):
        attention_mask = attention_mask.clone()
        attention_mask[:, : -keep - 1] = 0
        return correct(model, keep, input_ids, attention_mask, labels, **kwargs)

    monkeypatch.setattr(reinforcement.UnsharedTrainer, "call", staticmethod(without_prompts))
    chosen = ("--providers", "sdpa", "flashmask_unshared", "--cases", "16:8")
    monkeypatch.setattr(sys, "argv", ["reinforcement.py", "--models", "tiny", "--device", "cpu", *chosen])
    with pytest.raises(SystemExit, match="flashmask_unshared and sdpa disagree"):
        reinforcement.main()


@pytest.mark.full
def test_a_provider_out_of_memory_is_recorded_and_the_others_go_on(reinforcement, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("out")

    monkeypatch.setattr(reinforcement.UnsharedTrainer, "call", staticmethod(fail))
    file = tmp_path / "grpo.csv"
    chosen = ("--providers", "flashmask", "flashmask_unshared", "--cases", "16:8", "--turns", "1", "--csv", str(file))
    monkeypatch.setattr(sys, "argv", ["reinforcement.py", "--models", "tiny", "--device", "cpu", *chosen])
    reinforcement.main()
    with open(file, newline="") as opened:
        ours, other = csv.DictReader(opened)
    assert int(ours["update_tokens_per_second"]) > 0
    assert other["update_tokens_per_second"] == other["forward_tokens_per_second"] == "out of memory"
    assert other["update_peak_gib"] == ""
