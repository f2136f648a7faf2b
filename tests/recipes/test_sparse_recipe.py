"""The recipe on dynamic sparse attention, run as a user runs it for a few steps on the CPU."""

import csv
import os
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tools.recipes import RECIPES
from tools.tiny import assert_exact, assert_same_gradients, gradients_of
from torch import Tensor, nn

RECIPE = RECIPES / "sparse.py"
DDP = str(RECIPE.parent / "configs" / "accelerate_ddp.yaml")
LAUNCH = {
    "python": [sys.executable],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--config_file", DDP],
}


def run(command: list[str], *flags: object) -> str:
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = [*command, str(RECIPE), "--smoke", *map(str, flags)]
    result = subprocess.run(program, capture_output=True, text=True, timeout=300, env=threads)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


class KeyProjection(nn.Module):
    """The query projection with every head's vector normalized."""

    def __init__(self, q_proj: nn.Module, head_dim: int):
        super().__init__()
        self.q_proj, self.head_dim = q_proj, head_dim

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), dim=-1).flatten(-2)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", ["flashmask", "hash_16"])
def test_keys_are_normalized_queries(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Loss and gradients equal stock layers with such a key projection, but queries are projected only once."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    recipe = runpy.run_path(str(RECIPE))
    model, stock = (
        recipe["build_model"](variant, recipe["parse"](["--smoke", *flags])).double()
        for flags in ([], ["--separate-keys"])
    )
    for layer in stock.model.layers:
        layer.self_attn.k_proj = KeyProjection(layer.self_attn.q_proj, layer.self_attn.head_dim)
    projected = []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, *_: projected.append(module))
    rows = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    losses = [x(input_ids=rows, labels=rows, use_cache=False).loss for x in (model, stock)]
    assert len(projected) == len(set(projected)) == len(model.model.layers)
    assert_exact(losses[:1], losses[1:])
    for loss in losses:
        loss.backward()
    assert_same_gradients(gradients_of(model), gradients_of(stock))


@pytest.mark.full
@pytest.mark.parametrize("how", LAUNCH)
def test_all_variants_learn(tmp_path: Path, how: str) -> None:
    run(LAUNCH[how], "--out", tmp_path)
    losses: dict[str, list[float]] = {}
    for row in read(tmp_path / "sparse_256_steps.csv"):
        losses.setdefault(row["variant"], []).append(float(row["loss"]))
    assert list(losses) == ["sdpa", "flashmask", "hash_16", "qk_30", "qk_50"]
    # The drop depends on the machine's text; losses of an untrained model differ by 0.05 at most between batches.
    assert all(statistics.mean(taken[-4:]) < taken[0] - 0.05 for taken in losses.values())
    assert losses["flashmask"] == pytest.approx(losses["sdpa"], abs=1e-3)
    assert len({taken[0] for taken in losses.values()} - {losses["sdpa"][0]}) >= 3  # sparse variants see fewer keys
    summary = {row["variant"]: row for row in read(tmp_path / "sparse_256.csv")}
    assert {row["processes"] for row in summary.values()} == {"2" if how == "accelerate" else "1"}
    assert float(summary["sdpa"]["against_sdpa"]) == 1
    held_out = {name: float(row["held_out_loss"]) for name, row in summary.items()}
    assert held_out["flashmask"] == pytest.approx(held_out["sdpa"], abs=1e-3)
    assert all(4 < loss < 5.5 for loss in held_out.values())


@pytest.mark.full
def test_time_only_skips_the_evaluation() -> None:
    printed = run(LAUNCH["python"], "--time-only", "--separate-keys", "--variants", "hash_16", "sdpa")
    rows = [line for line in printed.splitlines() if line.startswith("variant=")]
    assert [row.split()[0] for row in rows] == ["variant=hash_16", "variant=sdpa"]
    assert "against_sdpa=1.0" in rows[1]
    assert all(row.endswith("held_out_loss=") for row in rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--held-out", "3"], "--held-out 3 is no multiple of --batch 4"),
        (["--batch", "0"], "argument --batch: must be at least 1, got 0"),
    ],
)
def test_wrong_flags_are_named_before_training(capsys: pytest.CaptureFixture, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        runpy.run_path(str(RECIPE))["parse"](flags)
    assert message in capsys.readouterr().err


def test_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with accelerate_ddp.yaml where there is no GPU: each would train alone and overwrite the others' files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2 processes were launched for GPUs, and there is none; add --smoke"):
        runpy.run_path(str(RECIPE))["main"](["--shape", "tiny", "--length", "64", "--steps", "1", "--variants", "sdpa"])
