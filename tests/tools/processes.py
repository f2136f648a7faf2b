"""Runs cases in groups of processes (gloo, on the CPU): all of them in one launch, which imports once and then forks.

A module of cases has a dict `CASES` of functions of a process group, by name. Each returns numbers, which are the same
in every process, or raises. `run_cases` returns what process 0 got, or the error of the first process that raised. Its
results are kept for the test run, whose tests of one module may run in several workers and at several times. So is the
log of a launch that failed, which later callers raise at once.
A dict `GROUPS` has the sizes of the groups that a case runs in, if these are not all. A dict `KILLED` has, by the name
of a case, functions whose processes end by SIGKILL; they run before the cases, in groups of their own of 2 or more.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def run_cases(
    folder: Path, module: str, sizes: tuple[int, ...], without: Collection[str] = ()
) -> dict[int, dict[str, Any]]:
    """Run every case of a module in groups of each size, in a program of its own, once per test run.

    Args:
        folder: folder of the test run. Cases write files to $CASES_FOLDER, the folder in it with the module's name.
        module: name of the module.
        sizes: numbers of processes.
        without: names of cases that are not run, each followed by "-" and a size where only that group is left out.

    Returns:
        for each size and name, what the case returned, or {"error": traceback}.
    """
    folder = folder / module
    folder.mkdir(exist_ok=True)
    results = {size: [folder / f"{size}-{rank}.json" for rank in range(size)] for size in sizes}
    log = folder / "log"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            settings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # meshes would be of its GPUs
            settings["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
            settings |= {"CASES_LEFT_OUT": json.dumps(sorted(without)), "CASES_FOLDER": str(folder)}
            command = [sys.executable, "-W", "ignore", "-m", "tools.processes", module, str(folder), *map(str, sizes)]
            with log.open("w") as out:
                launched = subprocess.Popen(command, env=settings, stdout=out, stderr=out, start_new_session=True)
                try:
                    launched.wait(timeout=600)
                except BaseException as error:
                    os.killpg(launched.pid, signal.SIGKILL)  # the forks, too
                    print(repr(error), file=out)
                    raise
        assert all(path.exists() for paths in results.values() for path in paths), log.read_text()[-6000:]
    found = {}
    for size, paths in results.items():
        ranks = [json.loads(path.read_text()) for path in paths]
        found[size] = {
            name: next((rank[name] for rank in ranks if "error" in rank[name]), ranks[0][name]) for name in ranks[0]
        }
    return found


def result(found: dict[Any, Any], size: int, name: str) -> Any:
    """Return what `run_cases` found for a case, or fail with its error."""
    outcome = found[size][name]
    assert "error" not in outcome, outcome["error"]
    return outcome


def each_case(cases: list[tuple[int, str]], full: Collection[str]) -> list[Any]:
    """Return pairs of a size and a case as test parameters, marked full if `full` has the case, or case-size."""
    return [pytest.param(n, x, marks=[pytest.mark.full] * bool({x, f"{x}-{n}"} & {*full})) for n, x in cases]


def left_out(request: pytest.FixtureRequest, full: Collection[str]) -> Collection[str]:
    """Return the cases of `full` that this test run leaves out: all, or none if a test of the module is full."""
    items = [item for item in request.session.items if item.path == request.path]
    return () if any(item.get_closest_marker("full") for item in items) else full


def _run_process(cases: dict[str, Any], rank: int, size: int, folder: str, store: str) -> None:
    """Run the cases in one process of a group, which meets in the folder `store`, and write what they returned."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if size > 1:  # accelerate reads these
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    results: dict[str, Any] = {}
    for name, case in cases.items():
        start = time.process_time()
        try:
            results[name] = case(dist.group.WORLD)
            results[name]["seconds"] = time.process_time() - start
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    Path(folder, f"{size}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(module: str, folder: str, *sizes: str) -> None:
    """Run the groups one after the other."""
    imported = importlib.import_module(module)
    gc.freeze()  # the collector skips what the forks share
    without = {*json.loads(os.environ["CASES_LEFT_OUT"])}
    for size in map(int, sizes):
        groups = getattr(imported, "GROUPS", {})
        cases = {name: case for name, case in imported.CASES.items() if size in groups.get(name, (size,))}
        cases = {name: case for name, case in cases.items() if not {name, f"{name}-{size}"} & without}
        for name, case in getattr(imported, "KILLED", {}).items():
            if name in cases and size > 1:
                ends = _run_group({name: case}, size, folder)
                assert ends == [-signal.SIGKILL] * size, f"{name}: the processes of a group of {size} end with {ends}"
        _run_group(cases, size, folder)


def _run_group(cases: dict[str, Any], size: int, folder: str) -> list[int]:
    """Fork the processes of a group, and return their exit codes, -n after signal n."""
    with tempfile.TemporaryDirectory() as store:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    _run_process(cases, rank, size, folder, store)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(0)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    main(*sys.argv[1:])
