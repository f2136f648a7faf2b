"""Measure what a new user waits for: the first call in a fresh process, and the way from `git clone` to a first step.

    python recipes/benchmarks/first.py call --csv results/first_call_h200.csv
    python recipes/benchmarks/first.py step --csv results/first_step_cpu.csv

`call` runs forward and backward of 4,096 tokens, 16 heads of 128, bfloat16, two causal documents, with an empty and a
full cache of compiled kernels on disk, each in a process of its own. `import_s` is the import of this package after
torch, transformers and CUDA, `first_s` the first forward and backward, `second_ms` the next.

`step` clones this checkout's last commit, runs `make demo` there with a new environment, and times what it prints.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGES = {
    "environment installed": rb"\nSuccessfully installed [^\n]*flashmask-hf",
    "first training step": rb"[\r\n] *\d+%\|[^|\r\n]*\| *[1-9]\d*/\d+ \[",  # the only bar without a name
    "trained and answered": rb"\nPicture of the loss ",
}
"""What `make demo` prints when a stage is over."""

VERSIONS = "import torch, triton, transformers as t; print(torch.__version__, triton.__version__, t.__version__)"


def child(device: str) -> None:
    import torch
    import transformers.modeling_utils  # noqa: F401  # not part of the import that is timed

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    shape = (1, 4096, 16, 128) if device == "cuda" else (1, 128, 2, 16)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in "qkv")
    synchronize()
    start = time.perf_counter()
    from flashmask_hf import flashmask_attention, masks

    times = [time.perf_counter() - start]
    mask = masks.causal_document([shape[1] // 4, shape[1] - shape[1] // 4]).to(device)
    for _ in range(2):
        start = time.perf_counter()
        out = flashmask_attention(q, k, v, mask)
        out.backward(torch.ones_like(out))
        synchronize()
        times.append(time.perf_counter() - start)
    print(json.dumps(times))


def calls(warm: int, device: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", *["full"] * warm):
            command = [sys.executable, __file__, "child", device]
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            imported, first, second = json.loads(found.stdout.splitlines()[-1])
            times = {"import_s": round(imported, 2), "first_s": round(first, 2), "second_ms": round(1000 * second, 2)}
            rows.append({"cache": state, **times})
    return rows


def passed(command: list[str], folder: Path) -> dict[str, float]:
    """Run a command, and return the seconds after which each of `STAGES` was over.

    Raises:
        RuntimeError: the command failed, or printed nothing of a stage.
    """
    start, found, printed = time.monotonic(), dict[str, float](), b"\n"
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


def steps() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "flashmask-hf"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        found = passed(["make", "demo"], checkout)
        python = checkout / ".venv" / "bin" / "python"
        versions = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()
    cpu = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.*)$", cpu.read_text(), re.MULTILINE) if cpu.exists() else None
    machine = {"gpu": "cpu", "processor": name[1] if name else platform.machine(), "cores": os.cpu_count()}
    machine |= zip(("python", "torch", "triton", "transformers"), [platform.python_version(), *versions], strict=True)
    return [{"stage": stage, "seconds": round(seconds, 1), **machine} for stage, seconds in found.items()]


def main(argv: Sequence[str] | None = None) -> None:
    from harness import Flag, program, whole  # imports this package, which a child must not do before it is timed

    what = Flag(None, ("call", "step"), name="what")
    warm = Flag(3, None, "number of processes with a full cache", whole)
    measure = program(__doc__, gpu=False, what=what, warm=warm)
    measure(lambda a: [calls(a.warm, a.device) if a.what == "call" else steps()])(argv)


if __name__ == "__main__":
    child(sys.argv[2]) if sys.argv[1:2] == ["child"] else main()
