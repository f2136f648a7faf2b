"""Messages of device assertions: a GPU cuts them after 254 characters, so that all are within 200."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import flashmask_hf
from flashmask_hf._numbers import as_integer
from flashmask_hf.hf.checks import CHECKS
from flashmask_hf.torch_internals import device_assert

PACKAGE = Path(flashmask_hf.__file__).parent

SINKS = {"device_assert": 1, "check_between": 2, "_require": 2, "require": 1, "check_once": 3}
"""Functions that hand a message to a device assertion, and the place of the message among their arguments."""

PLACEHOLDERS = {
    "type(model).__name__": "Qwen2_5_VLForConditionalGeneration",
    "call.name": "Qwen2_5_VLForConditionalGeneration",
    "call.implementation": "flash_attention_2",
    "text_attention(call)": "flash_attention_2",
    "implementation": "flash_attention_2",
    "window": "131072",
}
"""Realistic values of what messages name. All others are numbers, of which 1048576 is a long one."""


def find_messages() -> Iterator[tuple[str, str]]:
    """Yield the place of each message of the package and its longest form."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if not any(f"{sink}(" in text for sink in (*SINKS, "rule")):
            continue
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        module = importlib.import_module(name)
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        yield from _messages_of_checks(name, functions, module)
        for function in functions:
            parameters = {argument.arg for argument in function.args.args}
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                sink = getattr(call.func, "id", getattr(call.func, "attr", ""))
                if sink not in SINKS or len(call.args) <= SINKS[sink]:
                    continue
                message = call.args[SINKS[sink]]
                handed_on = isinstance(message, ast.Name) and message.id in parameters
                if not handed_on:
                    yield f"{name}:{call.lineno}", _render(message, function, module)


def _messages_of_checks(name: str, functions: list[ast.FunctionDef], module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the place of the message of each verdict of a module, its second value, and the message's longest form."""
    for function in functions:
        if ast.unparse(function.returns or ast.Constant(None)) in ("Verdict", "Verdict | None", "tuple[bool, str]"):
            returned = [x.value for x in ast.walk(function) if isinstance(x, ast.Return)]
            texts = [x.elts[1] for x in returned if isinstance(x, ast.Tuple)]
            yield (
                f"{name}:{function.name}",
                max((_render(text, function, module) for text in texts), key=len, default=""),
            )


def _assigned(name: str, function: ast.FunctionDef) -> list[ast.expr]:
    """Return what a function assigns to a name."""
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                else:
                    pairs = [(target, node.value)]
                found += [value for at, value in pairs if isinstance(at, ast.Name) and at.id == name]
    return found


def _render(node: ast.expr, function: ast.FunctionDef, module: ModuleType) -> str:
    """Return the longest text that an expression of strings can be."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_render(part, function, module) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _render(node.value, function, module)
    if isinstance(node, ast.IfExp):
        return max((_render(part, function, module) for part in (node.body, node.orelse)), key=len)
    source = ast.unparse(node)
    if source in PLACEHOLDERS:
        return PLACEHOLDERS[source]
    if isinstance(node, ast.Name):
        if isinstance(getattr(module, node.id, None), str):
            return getattr(module, node.id)
        values = _assigned(node.id, function)
        if values:
            return max((_render(value, function, module) for value in values), key=len)
    return "1048576"


MESSAGES = dict(find_messages())


def test_messages_are_found() -> None:
    assert len(MESSAGES) >= 30
    assert {f"{check.run.__module__}:{check.run.__name__}" for check in CHECKS} <= MESSAGES.keys()
    assert any("FlashMask.validate" in message for message in MESSAGES.values())


@pytest.mark.parametrize("place", MESSAGES)
def test_a_message_of_a_device_assertion_is_within_200_characters(place: str) -> None:
    assert len(MESSAGES[place]) <= 200, f"{len(MESSAGES[place])}: {MESSAGES[place]}"


def test_a_device_gets_no_more_of_a_message_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda _, message: handed.append(message))
    device_assert(torch.tensor(True), "x" * 300)
    assert handed == ["x" * 254]


def test_an_integer_out_of_range_gives_its_reason_if_there_is_any() -> None:
    for why, end in (("", r"got 0$"), ("0 is no tile", r"got 0; 0 is no tile$")):
        with pytest.raises(ValueError, match=end):
            as_integer("tokens", 0, 1, why=why)
