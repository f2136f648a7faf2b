"""Processes that take turns on one GPU, which stops and resumes their kernels at any instruction."""

import multiprocessing
import time

import pytest
import torch

from flashmask_hf import flashmask_attention, masks

LENGTH, BATCH, HEADS = 4352, 15, 64


def repeat(device, impl, deterministic, seconds, length=LENGTH, batch=BATCH, heads=HEADS):
    """Run forward and backward again and again, and raise where the gradients differ from those of the first run."""
    torch.manual_seed(0)
    mask = masks.global_sliding_window(length, length // 16, length // 16, causal=False, device=device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, dout = (torch.randn(batch, heads, length, 64, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients():
        out = flashmask_attention(q, k, v, mask, deterministic=deterministic, impl=impl)
        return torch.autograd.grad(out, leaves, dout)

    first = gradients()
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        for one, other in zip(gradients(), first, strict=True):
            if deterministic:
                assert torch.equal(one, other)
            else:
                assert (one - other).abs().max() <= 0.05 * other.abs().max()


def run_processes(count, timeout, *arguments):
    """Run `repeat` in several processes, and return their exit codes, None for those that hang."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=repeat, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


@pytest.mark.full
def test_processes_are_watched():
    assert run_processes(2, 60, "cpu", "torch", True, 0.1, 64, 1, 2) == [0, 0]
    assert run_processes(1, 0.1, "cpu", "torch", True, 60, 64, 1, 2) == [None]


@pytest.mark.hopper
@pytest.mark.full
@pytest.mark.parametrize("deterministic", [True, False])
def test_processes_take_turns(deterministic):
    """Each process finishes; its gradients are those of its first run, to the bit or to 5% of the largest.

    Deterministic calls hung while Triton put the number of the next work item where the kernel had made an mbarrier.
    """
    assert run_processes(6, 90, "cuda", "hopper", deterministic, 20) == [0] * 6
