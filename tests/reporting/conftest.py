"""The command line, run in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from rooftrace._reading import digest_of
from rooftrace.reporting.cli import main
from rooftrace.tracer.phases.apart import Traced
from rooftrace.tracer.phases.sizing import TraceCache
from rooftrace.tracer.phases.tracing import TargetSource


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


KEPT: dict[Path, Traced] = {}
"""What targets were traced to, by what the cache of forms keeps a trace by."""


@pytest.fixture
def kept_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target is traced once for all commands that ask the same of it, while its files stay.

    For tests of what commands make of a trace; forms keep theirs in the same way.
    """
    trace = TargetSource.traced

    def traced_once(source: TargetSource) -> Traced:
        place = TraceCache(Path())._place(source.job)
        if place is None:
            return trace(source)
        made = KEPT.get(place)
        if made is None or any(digest_of(p, whole=True) != was for p, was in made.files.items()):
            made = KEPT[place] = trace(source)
        return replace(made, graphs=dict(made.graphs), files=dict(made.files))

    monkeypatch.setattr(TargetSource, "traced", traced_once)


@pytest.fixture
def empty_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kept_targets: None
) -> Path:
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
