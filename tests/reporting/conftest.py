"""The command line, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rooftrace.reporting.cli import main


class Ran(NamedTuple):
    """Exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process, from the root of the repository."""
    monkeypatch.chdir(root)

    def call(*arguments: str | Path) -> Ran:
        capfd.readouterr()
        code = 0
        try:
            main([str(a) for a in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return call
