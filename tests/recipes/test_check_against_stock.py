"""The program that trains with TRL's trainer and with this package's, and prints both losses."""

import re

import pytest
import tools.recipes  # noqa: F401  # makes the recipes importable
import torch
from tools.tiny import TRAINER_WARNINGS

import check_against_stock  # isort: skip

pytestmark = [
    *TRAINER_WARNINGS,
    pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning"),
]

NUMBER = r" +(-?[\d.]+)"
LINE = re.compile(rf"^ +\d+{NUMBER}{NUMBER}{NUMBER}{NUMBER}$", re.MULTILINE)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a few rows of each recipe's demo data to files."""
    folder = tmp_path_factory.mktemp("files")
    for name, (_, _, demo) in check_against_stock.TRAINERS.items():
        demo()["train"].select(range(24)).to_json(folder / f"{name}.jsonl")
    return folder


def run(name, files, model, tmp_path, capsys, *flags):
    """Run the program; return rows of the loss of TRL, ours, the gradient norm of TRL, ours; and what it printed."""
    common = ["--model_name_or_path", model, "--dataset_name", files / f"{name}.jsonl", "--output_dir", tmp_path]
    rewards = ["--reward_funcs", "copied_words_reward", "--max_completion_length", 12] if name == "grpo" else []
    flags = ["--use_cpu", "--learning_rate", 1e-3, "--max_steps", 3, *rewards, *flags]
    check_against_stock.main([name, *map(str, [*common, *flags])])
    printed = capsys.readouterr().out
    return [[float(number) for number in found] for found in LINE.findall(printed)], printed


CASES = [pytest.param(name, marks=pytest.mark.full) for name in ("sft", "dpo", "reward", "grpo")]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient_norms_equal_those_of_trl(name, files, model, tmp_path, capsys):
    rows, printed = run(name, files, model, tmp_path, capsys)
    assert len(rows) == 3
    for loss, our_loss, norm, our_norm in rows:
        assert our_loss == pytest.approx(loss, rel=1e-5, abs=3e-6)  # 2e-6, and two roundings to six digits
        assert our_norm == pytest.approx(norm, rel=1e-4)
        assert our_norm != 0 or name == "grpo"  # whose completions may all have one reward
    assert any(norm for *_, norm in rows)
    stock, ours = (int(x.replace(",", "")) for x in re.findall(r"([\d,]+) (?:with padding|here)", printed))
    assert 0 < ours < stock


@pytest.mark.full
def test_runs_that_differ_fail(files, model, tmp_path, capsys, monkeypatch):
    """Documents that see each other: the mask of one document per row."""
    from flashmask_hf.collators import DataCollatorForPackedLanguageModeling

    collate = DataCollatorForPackedLanguageModeling.__call__

    def joined(collator, rows):
        batch = collate(collator, rows)
        length = batch["input_ids"].shape[1]
        batch["startend_row_indices"].fill_(length)
        return batch | {"position_ids": torch.arange(length).expand_as(batch["input_ids"])}

    monkeypatch.setattr(DataCollatorForPackedLanguageModeling, "__call__", joined)
    with pytest.raises(SystemExit, match=r"differ by more than 0\.001"):
        run("sft", files, model, tmp_path, capsys)


@pytest.mark.parametrize("column", ["losses", "norms"])
def test_a_run_with_nan_fails(column, monkeypatch):
    stock = check_against_stock.Curve(torch.ones(3), torch.ones(3), 1)
    ours = stock._replace(**{column: torch.tensor([1, torch.nan, 1])})
    monkeypatch.setattr(check_against_stock, "compare", lambda name, argv: (stock, ours, 0.001))
    with pytest.raises(SystemExit, match=r"differ by more than 0\.001"):
        check_against_stock.main(["sft"])
    monkeypatch.setattr(check_against_stock, "compare", lambda name, argv: (stock, stock, 0.001))
    check_against_stock.main(["sft"])


@pytest.mark.parametrize("argv", [[], ["--max_steps", "3"], ["ppo"]])
def test_a_trainer_must_be_named(argv):
    with pytest.raises(ValueError, match="name one of sft, dpo, reward, grpo first"):
        check_against_stock.main(argv)
