"""Run a program, unchanged, with attn_implementation="flashmask" known to transformers, which has no plug-ins.

usage: python -m flashmask_hf run SCRIPT.py [ARGUMENT ...]
       python -m flashmask_hf run -m MODULE [ARGUMENT ...]
       python -m flashmask_hf run COMMAND [ARGUMENT ...]

COMMAND is a command of an installed package, such as trl:

    python -m flashmask_hf run trl sft --config sft.yaml --attn_implementation flashmask
    accelerate launch --num_processes 2 -m flashmask_hf run train.py --learning_rate 2e-5

Programs that it launches by accelerate know the backend, too. Other launchers must start this command
(torchrun -m flashmask_hf run train.py). Set environment variables of transformers, such as HF_HOME, outside.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_program(argv: Sequence[str]) -> int:
    """Run a program in this process, and return its exit code.

    Raises:
        SystemExit: the program exits by itself; or `argv` names no program, with a message and code 2.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    _keep_registered_in_launched_processes()
    program, *arguments = argv
    commands = importlib.metadata.entry_points(group="console_scripts", name=program)
    sys.argv = [program, *arguments]
    if program == "-m" and arguments:
        sys.argv = list(arguments)  # run_module puts the module's path in front
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif Path(program).is_file():
        sys.path[0] = str(Path(program).resolve().parent)  # as for `python SCRIPT.py`; it was the current folder
        runpy.run_path(program, run_name="__main__")
    elif commands:
        return next(iter(commands)).load()() or 0
    else:
        is_module = program == "-m"
        problem = "needs the name of a module" if is_module else "is no file, and no command of an installed package"
        print(f"{__doc__}\nerror: {program} {problem}", file=sys.stderr)
        raise SystemExit(2)
    return 0


def _keep_registered_in_launched_processes() -> None:
    """Make `accelerate launch`, which TRL's command calls, run its Python program by `python -m flashmask_hf run`."""
    if importlib.util.find_spec("accelerate") is None:  # nothing can be launched through it
        return
    from accelerate.commands import launch

    original = launch.launch_command

    def launch_command(args: Any) -> Any:
        if not args.no_python:
            module = ["-m"] if args.module else []
            args.training_script_args = ["run", *module, args.training_script, *args.training_script_args]
            args.module, args.training_script = True, "flashmask_hf"
        return original(args)

    launch.launch_command = launch_command
