"""Functions that the recipes share: flags, model, data, checkpoints, training, loading."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import data
import torch
import yaml
from accelerate import PartialState
from datasets import DatasetDict, load_from_disk
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

CONFIGS = Path(__file__).parent / "configs"

flag: Any = HfArg

BATCHES = ("per_device_train_batch_size", "per_device_eval_batch_size", "generation_batch_size")
COUNTS = ("gradient_accumulation_steps", "num_generations", "num_generations_eval", "steps_per_generation", *BATCHES)
"""Flags of trainers by which something is divided."""


@dataclass
class ShowArguments:
    """Flag of the recipes that show what was learned."""

    show: int = flag(
        default=0,
        help="After training, load the saved model and print its judgement, answers or filled-in text for this number "
        "of examples of the test split. Needs an evaluation: --do_eval or --eval_strategy.",
    )


class Flags(NamedTuple):
    """The parsed flags of the recipe and of TRL's dataclasses."""

    own: Any
    script: ScriptArguments
    training: Any
    model: ModelConfig
    mixture: DatasetMixtureConfig


class FlagError(ValueError):
    """A flag or a line of the configuration file that cannot be used."""


class Parser(TrlParser):
    """Parses flags and files, and raises a FlagError for a count that is too small, before a trainer divides by it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse flags, and return them and those that are unknown."""
        found, rest = super().parse_known_args(args, namespace)
        for name, least in {**dict.fromkeys(COUNTS, 1), "show": 0}.items():
            if isinstance(value := getattr(found, name, None), int) and value < least:
                raise FlagError(f"{name} must be at least {least}, got {value}")
        return found, rest


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Run a recipe's main function on the flags of this program; a wrong flag ends it with its message and code 1."""
    try:
        record(main)(sys.argv[1:])
    except FlagError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")
    gc.collect()  # a wrapped model is part of cycles; freed after its group, it may abort the process
    PartialState().destroy_process_group()


def parse(argv: Sequence[str], demo_config: Path, own: type, config: type, **defaults: Any) -> Flags:
    """Parse the flags; without a configuration file and a model, the demo's configuration applies.

    Args:
        argv: the flags.
        demo_config: path of the demo's configuration file.
        own: dataclass of the recipe's flags beyond TRL's.
        config: dataclass of the trainer's arguments.
        **defaults: of the dataclasses, replaced.

    Raises:
        FlagError: a flag or the file is invalid, `show` lacks an evaluation, or several processes find no GPUs.
    """
    types: Any = (own, ScriptArguments, config, ModelConfig, DatasetMixtureConfig)
    parser = Parser(
        types,
        epilog="--config FILE reads flags from a YAML file, which those of the command line override. Without --config "
        "and --model_name_or_path, the recipe runs its demo.",
    )
    optional = {x.name for x in fields(own) if x.type == (bool | None)}
    for action in parser._actions:
        if action.dest in optional:
            action.nargs, action.const = "?", True  # else `--flag` without a value is an error, unlike for bool
    defaults = {
        "bf16": is_torch_bf16_gpu_available(),
        "dataloader_pin_memory": torch.accelerator.is_available(),
    } | defaults
    parser.set_defaults_with_config(attn_implementation="flashmask", **defaults)
    if not {"--config", "--model_name_or_path", "--help", "-h"} & {flag.split("=")[0] for flag in argv}:
        argv = ["--config", str(demo_config), *argv]
    flags = Flags(*read_flags(parser, argv))
    check_processes()
    if getattr(flags.own, "show", 0) and not flags.training.do_eval:
        raise FlagError("show needs the test split, which only an evaluation reads; add --do_eval, or --show 0")
    return flags


def read_flags(parser: TrlParser, argv: Sequence[str], **options: Any) -> tuple[Any, ...]:
    try:  # without their cause, so that launchers print one traceback
        return parser.parse_args_and_config(list(argv), **options)
    except (OSError, yaml.YAMLError) as error:
        raise FlagError(f"config: {' '.join(str(error).split())}") from None
    except IndexError:
        raise FlagError("config: --config is the last flag; name the YAML file behind it") from None
    except (ValueError, ZeroDivisionError) as error:
        raise FlagError(str(error)) from None


def check_processes() -> None:
    """Raise a FlagError if several processes would train alone: accelerate groups none without GPUs."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > PartialState().num_processes:
        raise FlagError(f"{launched} processes were launched for GPUs, and there is none; add --use_cpu, or launch one")


def trainer_options(
    flags: Flags, demo: Callable[[], DatasetDict], build_model: Callable[[Path], None] = data.build_model
) -> dict[str, Any]:
    """Return the keyword arguments of a trainer; missing models and datasets are the demo's, written to `output_dir`.

    Raises:
        FlagError: the model, the dataset, a split or the checkpoint to resume from is missing.
    """
    _, script_args, training_args, model_args, mixture_args = flags
    if model_args.model_name_or_path is not None:
        check_model_path("model_name_or_path", model_args.model_name_or_path)
    training_args.resume_from_checkpoint = checkpoint_to_resume(training_args)
    training_args.layer_compiler = take_compiler(training_args)
    output_dir = Path(training_args.output_dir)
    if mixture_args.datasets:
        dataset: Any = get_dataset(mixture_args)
    elif name := script_args.dataset_name:
        try:
            dataset = data.load(name, script_args.dataset_config, streaming=script_args.dataset_streaming)
        except (FileNotFoundError, ValueError) as error:
            raise FlagError(f"dataset_name: {error}") from None
    else:
        dataset = make_demo_data(output_dir / "data", demo)
    for flag in ["dataset_train_split"] + ["dataset_test_split"] * training_args.do_eval:
        split = getattr(script_args, flag)
        if split not in dataset:
            way = "name one of them with the flag"
            if flag == "dataset_test_split":
                way += ", give a folder with files train and test, or leave do_eval and eval_strategy out"
            raise FlagError(f"{flag}: the dataset has no split {split!r}, but {', '.join(map(repr, dataset))}; {way}")
        if next(iter(dataset[split]), None) is None:
            raise FlagError(f"{flag}: the split {split!r} of the dataset is empty")
    if model_args.model_name_or_path is None:
        model_args.model_name_or_path = str(output_dir / "untrained")
        on_main_process(lambda: build_model(output_dir / "untrained"))
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    return {
        "model": model_args.model_name_or_path,
        "args": training_args,
        "train_dataset": dataset[script_args.dataset_train_split],
        "eval_dataset": dataset[script_args.dataset_test_split] if training_args.do_eval else None,
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
    }


def build(trainer_class: type, **options: Any) -> Any:
    """Build a trainer; its ValueError becomes a FlagError with options spelled as flags."""
    try:
        return trainer_class(**options)
    except ValueError as error:
        names = "|".join({x.name for x in (*fields(options["args"]), *fields(ModelConfig))} | {"split"})
        message = re.sub(rf"\b({names})=(['\"]?)([\w.-]+)\2", r"--\1 \3", str(error))
        raise FlagError(message) from None


def check_model_path(flag: str, name: str) -> None:
    path = Path(name)
    if (path.is_absolute() or name.startswith((".", "~"))) and not path.is_dir():
        raise FlagError(f"{flag}: there is no folder {name}")
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise FlagError(
            f"{flag}: {name} holds an adapter without its model; merge the two (merge_and_unload of peft's "
            "AutoPeftModelForCausalLM), save the result and the tokenizer to a folder, and name that"
        )


def make_demo_data(path: Path, demo: Callable[[], DatasetDict]) -> Any:
    on_main_process(lambda: demo().save_to_disk(path))
    return load_from_disk(path)


def on_main_process(write: Callable[[], object]) -> None:
    if PartialState().is_main_process:
        write()
    PartialState().wait_for_everyone()


def checkpoint_to_resume(args: TrainingArguments) -> str | None:
    """Return the checkpoint that `--resume_from_checkpoint` names: a path, or "true" for the last in `output_dir`.

    Raises:
        FlagError: the checkpoint is missing or incomplete.
    """
    wanted, output_dir = args.resume_from_checkpoint, Path(str(args.output_dir))
    if wanted is None:
        return None
    found = [path for path in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    found.sort(key=lambda path: int(path.name.split("-")[-1]))
    if str(wanted).lower() == "true":
        if not found:
            raise FlagError(f"resume_from_checkpoint: output_dir {output_dir} holds no checkpoint to resume from")
        wanted = str(found[-1])
    if is_whole(Path(wanted)):
        return wanted
    whole = [path for path in found if is_whole(path)]
    way_out = f"name the last whole checkpoint, {whole[-1]}" if whole else f"{output_dir} holds no whole checkpoint"
    raise FlagError(f"resume_from_checkpoint: {wanted} has no whole {TRAINER_STATE_NAME}; {way_out}")


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint is complete: the trainer writes its state last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True


def take_compiler(args: TrainingArguments) -> dict[str, Any] | None:
    """Take `--torch_compile` from the arguments: the trainer would compile the whole model."""
    if not args.torch_compile:
        return None
    options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    args.torch_compile, args.torch_compile_backend = False, None
    return options


def compile_layers(model: Any, **options: Any) -> None:
    """Compile each checkpointed layer of a transformers or PEFT model in place, once for rows of any length.

    `options` go to `torch.compile`.
    """
    torch._dynamo.config.specialize_float = True  # else dynamic=True traces each layer twice, for its float factors
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True, **options)
    # Steps with a cache are other graphs in every layer, up to torch's limit of compilations.
    model.generate = torch.compiler.set_stance("force_eager")(model.generate)


def train(trainer: Any, script_args: ScriptArguments) -> None:
    """Compile, train or resume, evaluate, save and push as the arguments say."""
    args = trainer.args
    if args.layer_compiler is not None:
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                compile_layers(trainer.accelerator.unwrap_model(model), **args.layer_compiler)
    if script_args.ignore_bias_buffers:  # as `trl dpo` does
        buffers = trainer.model.named_buffers()
        trainer.model._ddp_params_and_buffers_to_ignore = [name for name, held in buffers if held.dtype == torch.bool]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Model saved to {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


def load_for_inference(auto_class: Any, path: str, args: Any, **kwargs: Any) -> Any:
    unset_hf_deepspeed_config()  # else ZeRO-3 shards the model over processes that do not load it
    attention = args.model_init_kwargs["attn_implementation"]
    model = auto_class.from_pretrained(
        path, attn_implementation=attention, trust_remote_code=args.trust_remote_code, **kwargs
    )
    print(f"Loaded {path} again, attn_implementation={attention!r}")
    return model.to(PartialState().device).eval()
