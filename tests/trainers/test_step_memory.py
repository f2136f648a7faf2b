"""What a row takes follows from two measured steps, and what does not fit on the GPU goes to the host."""

import os

import psutil
import pytest
import torch

from flashmask_hf.trainers import step_memory
from flashmask_hf.trainers.step_memory import StepMemory, available_gpu_bytes, available_host_bytes, gib


def test_two_steps_give_the_line():
    memory = StepMemory.from_two_steps((100, 300), (1200.0, 1600.0), stored=1500.0)
    assert memory == StepMemory(fixed=1000.0, working=2.0, stored=5.0)


@pytest.mark.parametrize(
    ("gpu", "host", "longest"),
    [
        (1706, 0, 100),  # of 706 bytes, at 7 a token
        (1500, 200, 100),
        (1200, 10**9, 100),  # the host takes any checkpoint, but the working memory must fit on the GPU
        (900, 10**9, 0),
    ],
)
def test_the_longest_row(gpu, host, longest):
    memory = StepMemory(fixed=1000.0, working=2.0, stored=5.0)
    assert memory.longest(gpu, host) == longest


def test_a_step_whose_memory_does_not_grow():
    memory = StepMemory.from_two_steps((100, 200), (1000.0, 1000.0), stored=400.0)
    assert memory.longest(1000, 200) == 100


def test_the_gpu_offers_what_is_free_and_what_the_allocator_holds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
    assert available_gpu_bytes() == pytest.approx(0.95 * 3000)


def test_a_container_and_other_processes_bound_the_host(tmp_path, monkeypatch):
    free = psutil.virtual_memory().available
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(step_memory, "CGROUP_LIMIT", limit)
    assert available_host_bytes() == pytest.approx(0.85 * free, rel=0.05)
    limit.write_text("max\n")
    assert available_host_bytes() == pytest.approx(0.85 * free, rel=0.05)
    used = psutil.Process().memory_info().rss
    limit.write_text(f"{used + 2**28}\n")
    assert available_host_bytes() == pytest.approx(0.85 * 2**28, rel=0.1)
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", "4")
    assert available_host_bytes() == pytest.approx(0.85 * 2**28 / 4, rel=0.1)
    limit.write_text(f"{used // 2}\n")
    assert available_host_bytes() == 0


def test_sizes_are_written_in_gib():
    assert gib(3 * 2**29) == "1.5 GiB"
