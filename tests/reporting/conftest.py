"""The command line, run in this process."""

from __future__ import annotations

import shutil
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


@pytest.fixture
def empty_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, of one name for all tests of a file: kept traces hold for all."""
    folder = tmp_path_factory.getbasetemp() / request.path.stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.fixture
def one_folder(empty_folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It as the working folder, also for the command line."""
    monkeypatch.chdir(empty_folder)
    return empty_folder
