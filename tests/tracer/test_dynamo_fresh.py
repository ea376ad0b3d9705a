"""Graph breaks in a process that has not imported Dynamo, beside what Dynamo says in another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.releases import needs_torch
from tests.tracer.compiled_modules import MODULES

pytestmark = [
    needs_torch(2, 11, "the Dynamo whose inner parts are read"),
    pytest.mark.slow,
    pytest.mark.subprocess,
]

FEW = ("Encoder", "Asks", "Twice", "Branches", "Plain", "Tries")
BY_VALUE = ("Loops",)
"""Modules whose graphs are compiled again for other numbers, which meta tensors do not have."""


def asked(who: str, *names: str) -> dict[str, Any]:
    program = Path(__file__).with_name("compiled_modules.py")
    command = [sys.executable, str(program), who, *names]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    return {k: v for line in told.stdout.splitlines() for k, v in json.loads(line).items()}


def without_graphs(said: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {k: v for k, v in each.items() if k != "graphs" or name not in BY_VALUE}
        for name, each in said.items()
    }


def test_breaks_are_those_of_explain() -> None:
    expected = asked("torch", *FEW)
    assert expected["Encoder"]["breaks"] == 0 and len(expected["Twice"]["lines"]) == 2
    assert asked("rooftrace", *FEW) == expected
    assert asked("traced", *FEW) == expected  # a trace leaves Dynamo as it would be without it
    assert asked("command", *FEW) == expected  # and one that has put Dynamo's import off


@pytest.mark.heavy
def test_breaks_of_all_modules_are_those_of_explain() -> None:
    expected = asked("torch")
    assert len(expected) == len(MODULES) > 40
    assert sum(each["breaks"] > 0 for each in expected.values()) > 12
    assert without_graphs(asked("rooftrace")) == without_graphs(expected)
    assert asked("traced") == expected
