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
    run(monkeypatch, "reinforcement.py", "--models", "tiny", "--device", "cpu", "--turns", 1, "--csv", file)
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    providers = ["flashmask", "flashmask_unshared", "sdpa", "tree_fa3"]
    cases = (("64", "16"), ("16", "32"))
    assert [(r["prompt"], r["completion"], r["provider"]) for r in rows] == [(*c, p) for c in cases for p in providers]
    for row in rows:
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
