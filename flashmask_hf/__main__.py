"""Command `python -m flashmask_hf`: print and test what serves attention here.

`python -m flashmask_hf run PROGRAM ...` runs a program with the backend registered instead (`flashmask_hf.run`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from flashmask_hf.diagnosis import diagnose
from flashmask_hf.run import run_program


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis and return the exit code: 1 if the self-test or the registration failed, else 0.

    With "run" as the first argument, run the program that the others name, and return its exit code.
    """
    if argv and argv[0] == "run":
        return run_program(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m flashmask_hf",
        description="Show versions, the GPU, the registration with transformers and the implementation that serves "
        "each dtype and head_dim, and check attention and its gradients against a float64 reference. Please put the "
        "output into a bug report. Exits with 1 if the self-test or the registration fails.",
        epilog="python -m flashmask_hf run PROGRAM ... runs a program, unchanged, with the backend registered; see "
        "python -m flashmask_hf run --help.",
    )
    parser.add_argument("--no-self-test", action="store_true", help="show the facts only, compute nothing")
    return 0 if diagnose(self_test=not parser.parse_args(argv).no_self_test) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
