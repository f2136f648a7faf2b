"""Measure what a new user waits for: from `git clone` to the first training step of `make demo`, and to its end.

    python recipes/benchmarks/first_step.py --csv results/first_step_cpu.csv

It clones this checkout's last commit into a folder of its own, runs `make demo` there with a new environment, and
times what the program prints. Needs git, make and Python alone; what pip downloads counts.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGES = {
    "environment installed": rb"\nSuccessfully installed [^\n]*flashmask-hf",
    "first training step": rb"[\r\n] *\d+%\|[^|\r\n]*\| *[1-9]\d*/\d+ \[",  # the only bar without a name
    "trained and answered": rb"\nPicture of the loss ",
}
"""What each stage of `make demo` prints when it is over, in the order in which they come."""

VERSIONS = "import torch, triton, transformers as t; print(torch.__version__, triton.__version__, t.__version__)"


def passed(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command, and return the seconds after which each of `STAGES` was over.

    Raises:
        RuntimeError: the command failed, or printed nothing of a stage; the message has the end of its output.
    """
    start, found, printed = time.monotonic(), {}, b"\n"
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        assert running.stdout is not None
        while chunk := os.read(running.stdout.fileno(), 2**16):
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            printed += chunk
            missing = next((stage for stage in STAGES if stage not in found), None)
            if missing is not None and re.search(STAGES[missing], printed):
                found[missing] = time.monotonic() - start
    if running.returncode != 0 or len(found) < len(STAGES):
        raise RuntimeError(f"{' '.join(command)} did not pass all stages:\n{printed[-2000:].decode(errors='replace')}")
    return found


def processor() -> str:
    """Return the name of the machine's processor."""
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="file to write the figures to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "flashmask-hf"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        found = passed(["make", "demo"], checkout)
        python = checkout / ".venv" / "bin" / "python"
        versions = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()
    conditions = {
        "gpu": "cpu",
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **dict(zip(("torch", "triton", "transformers"), versions, strict=True)),
    }
    rows = [{"stage": stage, "seconds": round(seconds, 1), **conditions} for stage, seconds in found.items()]
    for row in rows:
        print(f"{row['stage']}: {row['seconds']} s after make demo")
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
