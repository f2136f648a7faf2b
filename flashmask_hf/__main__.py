"""Command `python -m flashmask_hf`: print what serves attention on this machine, and test that it is right."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from flashmask_hf.diagnosis import diagnose


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis and return the exit code: 1 if the self-test or the registration failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m flashmask_hf",
        description="Show versions, the GPU, the registration with transformers and the implementation that serves "
        "each dtype and head_dim, and check attention and its gradients against a float64 reference. Please put the "
        "output into a bug report. Exits with 1 if the self-test or the registration fails.",
    )
    parser.add_argument("--no-self-test", action="store_true", help="show the facts only, compute nothing")
    return 0 if diagnose(self_test=not parser.parse_args(argv).no_self_test) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
