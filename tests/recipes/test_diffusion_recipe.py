"""The recipe for diffusion language models: its demo as a user runs it, filling in of masked tokens, and its flags."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tools.recipes import QUICK, launch, logged, run
from tools.tiny import FUSED_HEAD, TRAINER_WARNINGS

import common  # isort: skip
import diffusion  # isort: skip

pytestmark = [*TRAINER_WARNINGS, FUSED_HEAD]


@pytest.mark.full
def test_the_demo_learns_to_fill_in_facts(tmp_path):
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", 1, "--cpu"]
    flags = ["--disable_tqdm", True, "--use_cpu", "--save_strategy", "no"]
    printed = launch(accelerate, tmp_path, *flags, recipe="diffusion")
    losses = logged(printed, "loss")
    assert losses[-1] < 0.2 * losses[0]
    assert f"Loaded {tmp_path} again, attn_implementation='flashmask'" in printed
    assert sum(line.startswith(("Masked: ", "Filled: ")) for line in printed.splitlines()) == 12
    right, total = (int(word) for word in printed.splitlines()[-1].split() if word.isdigit())
    assert right > 0.8 * total


def test_a_run_on_whole_documents(tmp_path, capsys):
    printed = run("diffusion", capsys, tmp_path, *QUICK, "--max_steps", 1, "--block_size", 0, "--show", 1)
    assert printed.splitlines()[-1].endswith("masked tokens are as written")


def test_blocks_are_filled_one_after_the_other_the_likeliest_token_first():
    """The model's score of a token is its own number, of the mask token the highest."""
    seen: list[tuple[list[int], Any]] = []

    def model(ids: Any, startend_row_indices: Any, use_cache: bool) -> Any:
        seen.append((ids[0].tolist(), startend_row_indices))
        logits = torch.zeros(1, ids.shape[1], 10)
        logits[..., 9] = 9.0
        logits[0, :, 1] = torch.arange(ids.shape[1]) + 1.0
        return SimpleNamespace(logits=logits)

    filled = diffusion.fill(model, torch.tensor([5, 9, 9, 9, 6]), 9, 2)
    assert filled.tolist() == [5, 1, 1, 1, 6]
    assert [ids for ids, _ in seen] == [[5, 9], [5, 1, 9, 9], [5, 1, 9, 1]]
    assert seen[1][1].shape == (1, 1, 4, 4)


def test_a_model_without_an_embedding_for_the_mask_token_is_refused(tmp_path):
    import data

    data.build_model(tmp_path)
    args: Any = SimpleNamespace(trust_remote_code=False, model_init_kwargs=None)
    with pytest.raises(common.FlagError, match=r"2048 embeddings and none for <\|mask\|>, token 2048; add it"):
        diffusion.load_tokenizer(str(tmp_path), args)


def test_wrong_flags_are_refused(tmp_path):
    with pytest.raises(common.FlagError, match="even number of copies"):
        diffusion.main(["--output_dir", str(tmp_path), "--use_cpu", "--complementary"])
    for flag in ({"copies": 2}, {"complementary": True}, {"noise_per": "block"}):
        with pytest.raises(common.FlagError, match="--copies, --complementary and --noise_per need blocks"):
            diffusion.make_collator(diffusion.RecipeArguments(block_size=0, **flag), 9)
