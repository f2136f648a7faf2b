r"""Reinforcement learning by GRPO or RLOO with attn_implementation="flashmask", which computes each prompt once.

Every flag of `SharedPromptGRPOConfig` or `SharedPromptRLOOConfig`, the reward flags of `trl grpo`, and TRL's
`ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig` work, also in a YAML file:

    accelerate launch --quiet recipes/grpo.py                                     # the demo: configs/grpo_demo.yaml
    accelerate launch --quiet recipes/grpo.py --config recipes/configs/grpo.yaml

Differences from `trl grpo` and `trl rloo`:

- `attn_implementation`, bf16 and `--torch_compile` are as in `sft.py`.
- `--algorithm` is grpo or rloo.
- The log adds `shared_tokens_saved` and `mask_sparsity`; at the end, the first and last mean rewards are printed.
- A reward model is loaded with its own attention and revision.
- `--do_eval` evaluates at the end, `--picture` draws the reward and the mask of a group of completions.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
import data
import picture
from transformers import AutoModelForSequenceClassification
from trl import TrlParser
from trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

from flashmask_hf.trainers import (
    SharedPromptGRPOConfig,
    SharedPromptGRPOTrainer,
    SharedPromptRLOOConfig,
    SharedPromptRLOOTrainer,
)

DEMO_CONFIG = common.CONFIGS / "grpo_demo.yaml"

ALGORITHMS = {
    "grpo": (SharedPromptGRPOConfig, SharedPromptGRPOTrainer),
    "rloo": (SharedPromptRLOOConfig, SharedPromptRLOOTrainer),
}

REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
    "copied_words_reward": data.copied_words_reward,
}
"""Reward functions with a name: as in `trl grpo`, and the demo's."""


@dataclass
class RecipeArguments:
    """Flags of this recipe beyond TRL's trainer configs."""

    algorithm: str = common.flag(
        default="grpo", help="The trainer, and the config whose flags apply.", metadata={"choices": list(ALGORITHMS)}
    )
    reward_funcs: list[str] | None = common.flag(  # noqa: RUF009  # the text names functions
        default=None,
        help=f"Reward functions, added up: {', '.join(REWARDS)}, or dotted paths of functions of your own, such "
        "as `my_lib.rewards.short`, from the working directory on.",
    )
    reward_model_name_or_path: str | None = common.flag(
        default=None, help="Name or path of a reward model, a reward before those of `reward_funcs`."
    )
    picture: bool = common.flag(
        default=False,
        help="After training, draw the reward and the mask of one group of completions to picture.png in "
        "`output_dir`. Needs matplotlib.",
    )


def main(argv: Sequence[str]) -> None:
    flags = parse(argv)
    rewards = reward_functions(flags)
    options = common.trainer_options(flags, data.passages)
    _, trainer_class = ALGORITHMS[flags.own.algorithm]
    trainer = common.build(trainer_class, **options, reward_funcs=rewards)
    row = picture.latest_row(trainer.model) if flags.own.picture else []
    common.train(trainer, flags.script)
    if not trainer.accelerator.is_main_process:
        return
    report(trainer)
    if flags.own.picture:
        what = "the reward and of the mask of one group"
        picture.write(trainer.args.output_dir, what, lambda path: picture.draw_group(trainer, row[0], path))


def parse(argv: Sequence[str]) -> common.Flags:
    own: Any = [RecipeArguments]
    # Which flags there are follows from one of them.
    chosen: Any = common.read_flags(TrlParser(own, add_help=False), argv, return_remaining_strings=True)[0]
    config_class, _ = ALGORITHMS[chosen.algorithm]
    flags = common.parse(argv, DEMO_CONFIG, RecipeArguments, config_class)
    if not flags.own.reward_funcs and flags.own.reward_model_name_or_path is None:
        raise common.FlagError(
            f"reward_funcs is empty: name at least one of {', '.join(REWARDS)}, the dotted path of a function of your "
            "own, or a reward model (--reward_model_name_or_path)"
        )
    return flags


def reward_functions(flags: common.Flags) -> list[Callable[..., Any]]:
    """Load the reward functions and the reward model; raise a FlagError if one cannot be loaded."""
    rewards: list[Any] = []
    if flags.own.reward_model_name_or_path is not None:
        common.check_model_path("reward_model_name_or_path", flags.own.reward_model_name_or_path)
        rewards.append(
            AutoModelForSequenceClassification.from_pretrained(
                flags.own.reward_model_name_or_path,
                num_labels=1,
                dtype=flags.model.dtype,
                trust_remote_code=flags.training.trust_remote_code,
            )
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in flags.own.reward_funcs or []:
        if name in REWARDS:
            rewards.append(REWARDS[name])
            continue
        module, _, function = name.rpartition(".")
        if not module:
            raise common.FlagError(
                f"reward_funcs: {name} is none of {', '.join(REWARDS)}, and no dotted path such as my_lib.rewards.short"
            )
        try:
            rewards.append(pkgutil.resolve_name(f"{module}:{function}"))
        except (ModuleNotFoundError, AttributeError) as error:
            raise common.FlagError(f"reward_funcs: {name} cannot be loaded: {error}") from error
        if not callable(rewards[-1]):
            raise common.FlagError(f"reward_funcs: {name} is no function, but a {type(rewards[-1]).__name__}")
    return rewards


def report(trainer: Any) -> None:
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    if not logged:
        return
    first, last = logged[0], logged[-1]
    print(f"Mean reward: {first['reward']:.3f} at step {first['step']}, {last['reward']:.3f} at step {last['step']}")


if __name__ == "__main__":
    common.run(main)
