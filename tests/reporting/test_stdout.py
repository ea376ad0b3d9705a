"""stdout that is full, closed or broken: exit code 1 and one line, for every command."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rooftrace.measured.__main__ import main as measure_alone
from rooftrace.reporting.cli import cli, main

MODEL = """
import torch
def build():
    return torch.nn.Linear(8, 8), torch.empty(4, 8)
def prints():
    print("from the target", flush=True)
    return build()
"""
ONE = ("t.py:build", "--phase", "forward")
STEPS = "model,batch,ms,phase\nbuild,64,1,forward\nbuild,512,2,forward\nbuild,4096,6,forward\n"
STEPS_OF = ("steps.csv", "--chip", "l4", "--target", "t.py:{target}")
COMMANDS: list[tuple[str, ...]] = [
    ("--help",),
    ("--version",),
    ("report", "--help"),
    ("chips", "list"),
    ("chips", "show", "l4"),
    ("chips", "lint", "l4"),
    ("systems", "list"),
    ("systems", "show", "dgx-h100"),
    ("systems", "lint", "l40s-pcie"),
    ("report", *ONE, "--chip", "l4"),
    ("report", *ONE, "--chip", "l4", "--out", "folder", "--format", "json"),
    ("report", *ONE, "--chip", "l4", "--out", "-", "--format", "json"),
    ("report", *ONE, "--chip", "l4", "--out", "-", "--format", "csv"),
    ("report", *ONE, "--chip", "l4", "--out", "-", "--format", "md"),
    ("report", "t.py:prints", "--phase", "forward", "--chip", "l4"),
    ("explain", *ONE, "--chip", "l4"),
    ("explain", *ONE, "--chip", "l4", "--op", "0", "--format", "json"),
    ("sweep", *ONE, "--over", "batch=4", "--chip", "l4"),
    ("sweep", *ONE, "--over", "batch=4", "--chip", "l4", "--format", "csv"),
    ("solve", *ONE, "--step", "1s", "--over", "4", "--chip", "l4"),
    ("solve", *ONE, "--step", "1s", "--over", "4", "--chip", "l4", "--format", "json"),
    ("sensitivity", *ONE, "--chip", "l4"),
    ("sensitivity", *ONE, "--chip", "l4", "--grid", "batch=1,2", "--format", "csv"),
    ("report", *ONE, "--table", "census", "--chip", "l4"),
    ("report", *ONE, "--table", "census", "--chip", "l4", "--format", "csv"),
    ("breaks", *ONE, "--chip", "l4"),
    ("run", "--chip", "l4", "t.py"),
    ("report", *ONE, "--table", "nodes", "--chip", "l4"),
    ("report", *ONE, "--table", "nodes", "--chip", "l4", "--format", "json"),
    ("roofline", *ONE, "--chip", "l4"),
    ("roofline", *ONE, "--chip", "l4", "--format", "csv"),
    ("trace", *ONE, "-o", "-"),
    ("trace", *ONE, "-o", "graph.json"),
    ("diff", "t.py:build", *ONE, "--chip", "l4"),
    ("diff", "t.py:build", *ONE, "--chip", "l4", "--format", "json"),
    ("diff", "t.py:build", *ONE, "--chip", "l4", "--format", "md"),
    ("inventory", "t.py:build"),
    ("lock", *ONE, "-o", "-"),
    ("check", "--help"),
    ("inventory", "t.py:build", "--format", "json"),
    ("compare", *ONE, "--with", "flopcounter"),
    ("validate", *STEPS_OF),
    ("validate", *STEPS_OF, "--format", "json"),
    ("calibrate", *STEPS_OF, "-o", "-"),
    ("calibrate", *STEPS_OF, "-o", "knobs.toml"),
    ("measure", "--out", "run.json"),
    ("measure", "--chip-only"),
]


class Broken(io.RawIOBase):
    """A file that takes nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def writable(self) -> bool:
        return True

    def write(self, content: object) -> int:
        raise OSError(self.number, os.strerror(self.number))


def text(raw: io.RawIOBase) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")


@pytest.fixture(autouse=True)
def here(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target and steps; measurements of a device take no time."""
    (empty_folder / "t.py").write_text(MODEL)
    (empty_folder / "steps.csv").write_text(STEPS)
    monkeypatch.chdir(empty_folder)
    import rooftrace as rt

    monkeypatch.setattr("rooftrace.measured.bench.measure_suite", lambda *_: None)
    monkeypatch.setattr("rooftrace.measured.bench.summary", lambda *_: "a summary")
    monkeypatch.setattr("rooftrace.measured.__main__.measure_suite", lambda *_: None)
    monkeypatch.setattr("rooftrace.measured.__main__.summary", lambda *_: "a summary")
    monkeypatch.setattr(
        "rooftrace.measured.bench.measure_chip", lambda *_, **__: rt.load_chip("l4")
    )
    return empty_folder


def ended(arguments: tuple[str, ...]) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


def test_every_command_is_tried() -> None:
    assert {command[0] for command in COMMANDS} >= set(cli.commands)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_stdout_is_a_failure(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", text(Broken(errno.ENOSPC)))
    assert ended(command) == 1
    expected = "rooftrace: cannot write to stdout: No space left on device\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_stdout_is_a_failure_before_any_work(
    command: tuple[str, ...],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(here.iterdir())
    monkeypatch.setattr(sys, "stdout", None)  # what Python makes of `>&-`
    assert ended(command) == 1
    assert capsys.readouterr().err == "rooftrace: cannot write to stdout: it is closed\n"
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("command", COMMANDS[:7], ids=" ".join)
def test_a_reader_that_leaves_hears_nothing(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", text(Broken(errno.EPIPE)))
    assert ended(command) == 141  # as a shell shows SIGPIPE
    assert not capsys.readouterr().err


def test_a_stdout_that_is_closed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.TextIOWrapper(io.BytesIO())
    out.close()
    monkeypatch.setattr(sys, "stdout", out)
    assert ended(("chips", "list")) == 1
    assert "cannot write to stdout: I/O operation on closed file" in capsys.readouterr().err


def test_stderr_may_be_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (None, text(Broken(errno.ENOSPC))):
        monkeypatch.setattr(sys, "stdout", text(Broken(errno.ENOSPC)))
        monkeypatch.setattr(sys, "stderr", stream)
        assert ended(("chips", "list")) == 1
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
        assert ended(("report", "nothing")) == 2


def test_a_terminal_without_a_letter_gets_its_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    main(("chips", "show", "l4"))
    sys.stdout.flush()
    assert b"NVIDIA L4" in raw.getvalue()


def test_the_suite_alone_ends_so_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streams: tuple[Callable[[], io.TextIOWrapper | None], ...] = (
        lambda: text(Broken(errno.ENOSPC)),
        lambda: None,
    )
    for stream in streams:
        monkeypatch.setattr(sys, "stdout", stream())
        assert measure_alone(["--device", "cpu", "--out", "run.json"]) == 1
        assert capsys.readouterr().err.startswith("rooftrace: cannot write to stdout: ")


@pytest.mark.subprocess
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_the_installed_command_ends_so(root: Path) -> None:
    """A process of its own: the streams are real, and so is the end of the process."""
    read, write = os.pipe()
    os.close(read)
    ways = {"full": "> /dev/full", "closed": ">&-", "broken": f">&{write}"}
    script = "; ".join(
        f"({sys.executable} -m rooftrace --help {way}); echo {name} $? >&2"
        for name, way in ways.items()
    )
    ran = subprocess.run(
        ["bash", "-c", script], cwd=root, capture_output=True, text=True, pass_fds=(write,)
    )
    os.close(write)
    assert ran.stderr.splitlines() == [
        "rooftrace: cannot write to stdout: No space left on device",
        "full 1",
        "rooftrace: cannot write to stdout: it is closed",
        "closed 1",
        "broken 141",
    ]
