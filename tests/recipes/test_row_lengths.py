"""The study of row lengths runs on a CPU; what runs out of memory or time is recorded, and the others go on."""

import csv
import functools
import signal
import sys

import pytest
import torch
from tools.recipes import BENCHMARKS  # noqa: F401  # makes the benchmarks importable
from tools.tiny import TRAINER_WARNINGS
from torch.nn.attention.flex_attention import create_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from flashmask_hf import masks

import packed_attention  # isort: skip
import plots  # isort: skip
import row_lengths  # isort: skip

pytestmark = TRAINER_WARNINGS

TINY = ("--shapes", "tiny", "--device", "cpu")
GIVEN = {
    "documents": masks.causal_document([5, 1, 9]),
    "shared questions": masks.share_question([(4, [3, 2]), (2, [3, 1])]),
    "window": masks.sliding_window(15, 4),
    "not causal": masks.document([5, 1, 9]),
    "two intervals": masks.prefix_lm_document([(2, 5), (3, 10)]),
}


def read(path):
    with open(path, newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.parametrize("mask", GIVEN.values(), ids=GIVEN)
def test_dense_and_block_masks_show_what_the_vectors_show(mask, monkeypatch):
    monkeypatch.setattr(packed_attention, "ROWS", 4)
    assert torch.equal(packed_attention.dense_mask(mask), mask.to_dense())
    drawn = create_mask(packed_attention.visible_pairs(mask), 1, 1, 15, 15, device="cpu")
    assert torch.equal(drawn, mask.to_dense())


@pytest.mark.full
def test_every_task_runs_and_the_chart_is_drawn(tmp_path, monkeypatch, capsys):
    file = tmp_path / "row_lengths.csv"
    row_lengths.main([*TINY, "--lengths", "512", "--steps", "1", "--csv", str(file)])
    rows = read(file)
    assert [(row["task"], row["implementation"]) for row in rows] == [
        (task, name) for task in row_lengths.TASKS for name in ("flashmask", "sdpa")
    ]
    assert all(int(row["tokens_per_second"]) > 0 and row["steps"] == "1" and row["gpu"] == "cpu" for row in rows)
    assert [row["trained"] for row in rows[::2]] == ["all", "adapters", "all", "all"]
    printed = capsys.readouterr().out
    for name in ("flex_attention", *row_lengths.VARLEN):
        assert f"{name} is left out: " in printed
    monkeypatch.setattr(sys, "argv", ["plots.py", "--row-lengths", str(file), "--out", str(tmp_path)])
    plots.main()
    assert (tmp_path / "row_lengths_tiny.png").stat().st_size > 10_000
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(rows)
    assert table[2] == f"| tiny | sft | flashmask | {int(rows[0]['tokens_per_second']):,} |"


@pytest.mark.full
@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_adapters_are_trained_where_all_weights_do_not_fit(task):
    study = row_lengths.Alignment(task, "tiny", "cpu", adapters=True)
    trained = [name for name, x in study.bench.model.named_parameters() if x.requires_grad]
    assert all("lora_" in name or "score" in name for name in trained)
    study.check(["flashmask", "sdpa"], 512)
    assert row_lengths.studies(["llama-3.1-8b"], row_lengths.TASKS) == [
        ("llama-3.1-8b", name, True) for name in ("lora", "dpo", "reward")
    ]


def test_implementations_that_disagree_are_not_timed(monkeypatch):
    causal = functools.partial(
        packed_attention._converted,
        lambda mask: torch.ones(mask.kv_len, mask.kv_len, dtype=torch.bool).tril()[None, None],
        sdpa_attention_forward,
    )
    wrong = functools.partial(packed_attention._with_mask, causal)
    monkeypatch.setitem(packed_attention._FUNCTIONS, "sdpa", wrong)
    study = row_lengths.FineTuning("tiny", "cpu", adapters=False)
    with pytest.raises(SystemExit, match="the implementations disagree"):
        study.check(["flashmask", "sdpa"], 512)


@pytest.fixture(autouse=True)
def handlers():
    """The study changes what a process does when it is interrupted or terminated."""
    before = {number: signal.getsignal(number) for number in row_lengths.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Fake:
    """A study whose steps take no time, and in which SDPA's memory ends at 1,024 tokens."""

    def __init__(self):
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        self.taken = []

    def draw(self, length, count):
        return [length] * count

    def check(self, implementations, length):
        pass

    def step(self, implementation, row):
        self.taken.append((implementation, row))
        if implementation == "sdpa" and row > 1024:
            raise torch.OutOfMemoryError("out")


def run(monkeypatch, tmp_path, *flags):
    fake, file = Fake(), tmp_path / "fake.csv"
    monkeypatch.setattr(row_lengths, "build", lambda *_: fake)
    lengths = ("--lengths", "512", "1024", "2048", "4096")
    row_lengths.main([*TINY, "--tasks", "sft", *lengths, "--csv", str(file), *flags])
    return fake, {(row["implementation"], row["length"]): row for row in read(file)}


@pytest.fixture
def clock(monkeypatch):
    """A clock that the steps of `Fake` move by a second for each 512 tokens, and the first of FlexAttention by 30."""
    now, step = [0.0], Fake.step

    def slow(self, implementation, row):
        compiles = implementation == "flex_attention" and ("flex_attention", row) not in self.taken
        now[0] += 30 if compiles else row / 512
        step(self, implementation, row)

    monkeypatch.setattr(Fake, "step", slow)
    monkeypatch.setattr(row_lengths.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("harness.time.perf_counter", lambda: now[0])
    return now


@pytest.mark.full
def test_short_rows_of_all_tasks_come_first(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "--tasks", "sft", "dpo", "--steps", "1", "--implementations", "flashmask")
    order = [(row["task"], row["length"]) for row in read(tmp_path / "fake.csv")]
    short = ["512", "1024", "2048"]
    assert order == [(task, length) for task in ("sft", "dpo") for length in short] + [("sft", "4096"), ("dpo", "4096")]


@pytest.mark.full
def test_a_visit_that_compiles_for_long_goes_on_at_the_next(monkeypatch, tmp_path, clock):
    monkeypatch.setattr(row_lengths, "missing", lambda *_: "")
    flags = ("--implementations", "flashmask", "flex_attention", "--tasks", "sft", "dpo", "--steps", "1")
    run(monkeypatch, tmp_path, *flags, "--seconds", "400")
    rows = read(tmp_path / "fake.csv")
    assert [(row["task"], row["length"]) for row in rows[::2]] == [
        *(("sft", length) for length in ("512", "1024", "2048")),
        *(("dpo", length) for length in ("512", "1024", "2048")),
        *((task, "4096") for task in ("sft", "dpo")),
    ]
    clock[0] = 0
    run(monkeypatch, tmp_path, *flags, "--lengths", "512", "1024", "2048", "--seconds", "148")
    rows = read(tmp_path / "fake.csv")
    # A visit of 74 s has 5 s left after 1,024 tokens, too few for steps of up to 8 s; the other task compiles less.
    assert [(row["task"], row["length"], row["steps"]) for row in rows[::2]] == [
        *(("sft", length, "1") for length in ("512", "1024")),
        *(("dpo", length, "1") for length in ("512", "1024", "2048")),
        ("sft", "2048", "1"),
    ]


@pytest.mark.full
def test_out_of_memory_ends_the_series_of_one_implementation(monkeypatch, tmp_path):
    fake, rows = run(monkeypatch, tmp_path, "--steps", "3")
    assert [key for key in rows if key[0] == "sdpa"] == [("sdpa", "512"), ("sdpa", "1024"), ("sdpa", "2048")]
    assert rows["sdpa", "2048"]["tokens_per_second"] == "out of memory"
    assert rows["sdpa", "1024"]["against_sdpa"] == "1.0"
    assert rows["flashmask", "2048"]["against_sdpa"] == ""
    assert rows["flashmask", "4096"]["steps"] == "3"
    assert fake.taken.count(("sdpa", 2048)) == 1
    assert fake.taken.count(("flashmask", 512)) == 1 + 3
    assert fake.taken.count(("flashmask", 4096)) == 3


@pytest.mark.full
def test_only_what_compiles_for_a_length_warms_up_again(monkeypatch, tmp_path, clock):
    monkeypatch.setattr(row_lengths, "missing", lambda *_: "")
    flags = ("--implementations", "flashmask", "flex_attention", "--steps", "1")
    fake, rows = run(monkeypatch, tmp_path, *flags)
    for length in (1024, 2048, 4096):
        assert fake.taken.count(("flashmask", length)) == 1
        assert fake.taken.count(("flex_attention", length)) == 2
    assert {(row["tokens_per_second"], row["steps"]) for row in rows.values()} == {("512", "1")}


@pytest.mark.full
def test_repeats_are_skipped_and_series_end_when_the_time_is_up(monkeypatch, tmp_path, clock):
    flags = ("--implementations", "flashmask", "--steps", "5")
    _, rows = run(monkeypatch, tmp_path, *flags, "--seconds", "35")
    figures = {length: (row["tokens_per_second"], row["steps"]) for (_, length), row in rows.items()}
    # A tenth of the time allows a third step of 1 s. After 22 of 35 s, a step that may take four times 4 s is too long.
    assert figures == {"512": ("512", "3"), "1024": ("512", "2"), "2048": ("512", "2"), "4096": ("out of time", "0")}
    _, rows = run(monkeypatch, tmp_path, *flags, "--seconds", "23")
    assert rows["flashmask", "2048"]["steps"] == "2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_its_figures(monkeypatch, tmp_path, number):
    step = Fake.step

    def interrupted(self, implementation, row):
        if (implementation, row) == ("sdpa", 1024):  # after flashmask
            signal.raise_signal(number)
        step(self, implementation, row)

    figures_of = row_lengths.figures_of

    def interrupted_again(series, length):
        if length == 1024:
            signal.raise_signal(number)
        return figures_of(series, length)

    monkeypatch.setattr(Fake, "step", interrupted)
    monkeypatch.setattr(row_lengths, "figures_of", interrupted_again)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path, "--steps", "1")
    figures = {
        (x["implementation"], x["length"]): (x["steps"], x["tokens_per_second"]) for x in read(tmp_path / "fake.csv")
    }
    assert list(figures) == [(name, length) for length in ("512", "1024") for name in ("flashmask", "sdpa")]
    assert figures["flashmask", "1024"][0] == "1"
    assert figures["sdpa", "1024"] == ("0", "out of time")


def test_a_row_too_short_for_a_document_is_named():
    with pytest.raises(ValueError, match="a row of 100 tokens is too short: its documents have at least 128"):
        row_lengths.main([*TINY, "--tasks", "sft", "--lengths", "100"])


def test_documents_are_told_to_flash_attention():
    told = row_lengths.varlen_arguments(torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]]))
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 3, 4, 8]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert told["max_length_q"] == told["max_length_k"] == 4
    assert isinstance(told["max_length_k"], int)  # FlashAttention-4 takes no tensor
