"""`python -m flashmask_hf`: versions, registration, the table of implementations, and the self-test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashmask_hf
from flashmask_hf import diagnosis, flashmask_attention, masks, torch_internals
from flashmask_hf.__main__ import main
from flashmask_hf._call import call, implementations
from flashmask_hf.hf import patches

HEAD_DIMS = (40, 64, 96, 128, 192, 256, 512)
DTYPES = ("bfloat16", "float16", "float32", "float64")


def rows(text: str) -> dict[str, str]:
    """Return the lines whose first column holds a name, by that name."""
    return {line[:14].strip(): line[14:] for line in text.splitlines() if line[13:14] == " " and line[14:15] != " "}


def cells(text: str) -> dict[tuple[str, int], tuple[str, str | None]]:
    """Read the table: (dtype, head_dim) -> implementation or "raises", and the reason that its number stands for."""
    lines = text.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("head_dim"))
    assert tuple(map(int, lines[top].split()[1:])) == HEAD_DIMS
    notes: list[str] = []
    for line in lines[top + 1 + len(DTYPES) :]:
        if not line.startswith(" " * 14):
            break
        if line[14] == "[":
            notes.append(line.split("] ", 1)[1])
        else:
            notes[-1] += " " + line.strip()
    table = {}
    for dtype, line in zip(DTYPES, lines[top + 1 :], strict=False):
        assert line.startswith(dtype)
        for i, head_dim in enumerate(HEAD_DIMS):
            impl, _, number = line[14 + 12 * i : 26 + 12 * i].strip().partition(" ")
            table[dtype, head_dim] = (impl, notes[int(number.strip("[]")) - 1] if number else None)
    return table


def test_the_command_prints_facts_and_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flashmask_hf"])
    monkeypatch.delitem(sys.modules, "flashmask_hf.__main__", raising=False)
    with pytest.raises(SystemExit) as done:
        runpy.run_module("flashmask_hf", run_name="__main__")
    assert done.value.code == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    named = rows(printed)
    assert named["flashmask-hf"] == flashmask_hf.__version__
    assert named["Python"] == platform.python_version()
    assert named["torch"] == torch.__version__
    if torch_internals.HAS_TRITON:
        import triton

        assert named["triton"] == triton.__version__
    for package in ("transformers", "trl", "peft", "accelerate", "datasets"):
        assert named[package] == importlib.metadata.version(package)
    assert named["backend"] == 'transformers knows "flashmask"'
    assert sum(": ok, out " in line for line in lines) == 4
    assert lines[-1].startswith("self-test: ok, ")


def test_the_self_test_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-self-test"]) == 0
    printed = capsys.readouterr().out
    assert "self-test" not in printed
    assert "platform" in printed


def test_the_table_is_what_attention_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def spy_on(one: implementations.Implementation, prepare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: used.append(one.name) or prepare(*args)

    monkeypatch.setattr(call, "_calls", {})
    for one in implementations.REGISTRY:
        for name in ("forward", "decode"):
            monkeypatch.setattr(one, name, spy_on(one, getattr(one, name)))
    main(["--no-self-test"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = cells(capsys.readouterr().out)
    assert len(table) == len(DTYPES) * len(HEAD_DIMS)
    for (dtype, head_dim), (impl, reason) in table.items():
        q = torch.ones(1, 1, 4, head_dim, dtype=getattr(torch, dtype), device=device)
        mask = masks.causal(4, device=device)
        if impl == "raises":
            with pytest.raises(ValueError, match="impl='triton' cannot serve") as caught:
                flashmask_attention(q, q, q, mask)
            assert str(caught.value) == reason
        else:
            flashmask_attention(q, q, q, mask)
            assert used.pop() == impl
            assert (reason is None) == (impl == "hopper")
    assert not used


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["ampere", "hopper"])
@pytest.mark.parametrize("installed", [True, False])
def test_the_table_of_a_gpu_gives_the_reason_for_each_choice(
    installed: bool,
    capability: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_internals, "HAS_TRITON", installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    hopper = capability == (9, 0)
    diagnosis._print_implementations(torch.device("cuda", 0))
    for (dtype, head_dim), (found, reason) in cells(capsys.readouterr().out).items():
        if not installed:
            assert (found, reason) == ("torch", "Triton is not installed")
        elif dtype == "float64":
            assert found == "raises"
            assert reason is not None
            assert "dtype torch.float64 (it takes bfloat16, float16, float32)" in reason
        elif head_dim == 512:
            assert found == "raises"
            assert reason == "impl='triton' cannot serve head_dim 512 (its limit is 256); impl='torch' can, more slowly"
        elif hopper and dtype != "float32":
            assert (found, reason) == ("hopper", None)
        else:
            assert found == "triton"
            assert reason is not None
            assert "impl='hopper' cannot serve " in reason


def _scaled(*results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x * 1.05 for x in results)


def _first_scaled(first: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Break the output alone, or dq, whose error is not the last that is compared."""
    return first * 1.05, *others


def _not_a_number(*results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x * float("nan") for x in results)


def _raising(*results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise RuntimeError("no code for\nthis device")


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("breaking", [_scaled, _first_scaled, _not_a_number, _raising])
def test_a_broken_implementation_fails_the_self_test(
    breaking: Callable[..., Any], part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(prepare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *problem: lambda *tensors: breaking(*prepare(*problem)(*tensors))

    for one in implementations.REGISTRY:
        monkeypatch.setattr(one, part, broken(getattr(one, part)))
    monkeypatch.setattr(call, "_calls", {})
    monkeypatch.setattr(call, "_failed", set())
    assert main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert sum("documents: FAILED" in line or "question: FAILED" in line for line in lines) == 4
    assert lines[-1].startswith("self-test: FAILED 4 of 4")
    if breaking is _raising:
        assert "RuntimeError: no code for this device" in lines[-2]


def test_missing_packages_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_peft(name: str) -> str:
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_peft)
    monkeypatch.setattr(torch_internals, "HAS_TRITON", False)
    assert main(["--no-self-test"]) == 0
    named = rows(capsys.readouterr().out)
    assert named["peft"] == named["triton"] == "not installed"
    assert named["trl"] == version("trl")


def test_an_unknown_transformers_fails_the_registration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches.generic, "is_flash_attention_requested", lambda config: False)
    monkeypatch.setattr(diagnosis, "_run_self_test", lambda device: True)
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    said = " ".join(printed.split())
    assert 'backend transformers does not know "flashmask": transformers' in said
    assert "install a version it was tested with" in said


def test_missing_transformers_are_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--no-self-test"]) == 0
    assert "transformers is not installed: attention alone" in capsys.readouterr().out


@pytest.mark.parametrize("rocm", [False, True], ids=["CUDA", "ROCm"])
def test_facts_about_a_gpu(rocm: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm has no driver of NVIDIA's."""
    properties = SimpleNamespace(name="X100", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.version, "hip", "6.3" if rocm else None)
    monkeypatch.setattr(torch.version, "cuda", None if rocm else "12.8")
    monkeypatch.setattr(diagnosis.collect_env, "get_nvidia_driver_version", lambda run: "570.1")
    facts = "torch built for HIP 6.3" if rocm else "driver 570.1, torch built for CUDA 12.8"
    diagnosis._print_gpu(torch.device("cuda", 1))
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == f"GPU namespace(name='X100', major=9, minor=4), 2 of 8, {facts}"


@pytest.mark.gpu
def test_a_gpu_is_described_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert torch.cuda.get_device_name() in printed
    assert sum(line.startswith(("hopper, ", "triton, ")) and ": ok, out " in line for line in lines) == 4
