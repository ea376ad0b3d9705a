"""What a call is doing is told to its own listener, whatever thread the others are in."""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import monotonic, sleep

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace._progress import tell
from rooftrace.reporting.cli import main
from rooftrace.reporting.cli.shared import progress
from tests.conftest import ctrl_c_works

pytestmark = pytest.mark.quick


def test_a_listener_hears_what_calls_inside_do() -> None:
    heard: list[str] = []
    with rt.tools.telling(heard.append):
        rt.report(nn.Linear(8, 8), torch.ones(2, 8), chip="l4", execution="eager")
    rt.trace(nn.Linear(8, 8), torch.ones(2, 8))  # nobody listens any more
    assert heard == [
        "tracing forward",
        "tracing training",
        "forward, eager",
        "training, eager",
    ]


def test_the_progress_of_a_call_goes_before_that_of_its_block() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with rt.tools.telling(outer.append):
        rt.largest_batch(nn.Linear(8, 8), torch.ones(2, 8), chip="l4", progress=inner.append)
        assert inner and not outer
        with rt.tools.telling(None):
            tell("again")
    assert outer == ["again"]


def test_threads_have_listeners_of_their_own() -> None:
    together = Barrier(2)

    def told(name: str) -> list[str]:
        heard: list[str] = []
        with rt.tools.telling(heard.append):
            together.wait()
            tell(name)
            together.wait()
        return heard

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(told, ["one", "two"])) == [["one"], ["two"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_seconds_and_the_memory_of_what_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    clock = iter(range(0, 10**6, 7))
    monkeypatch.setattr("rooftrace.reporting.cli.shared.time.monotonic", lambda: next(clock))
    with progress():
        tell("tracing forward")
        sleep(0.3)
    memory = r", \d+\.\d GiB" if sys.platform == "linux" else ""
    assert re.search(rf"tracing forward \(\d+ s{memory}\)", shown.getvalue())


def test_a_pipe_sees_the_last_message_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr("rooftrace.reporting.cli.shared._EVERY", 0.05)
    with progress():
        tell("tracing forward")
        sleep(0.3)
    written = shown.getvalue()
    assert re.fullmatch(r"(starting \(\d+ s\)\n)?(tracing forward \(\d+ s\)\n){2,}", written)
    sleep(0.2)
    assert shown.getvalue() == written


def test_a_command_that_ends_collects_nothing_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A collection goes through millions of objects of a large graph, and waits for no Ctrl-C."""
    seen: list[bool] = []

    def said(self: object, *_: object) -> str:
        seen.append(gc.isenabled())
        return ""

    rt.save(rt.trace(nn.Linear(8, 8), torch.ones(2, 8)), tmp_path / "g.json")
    monkeypatch.setattr("rich.console.Console.print", said)
    main(["report", str(tmp_path / "g.json"), "--chip", "l4"])
    assert seen == [False] and gc.isenabled()


@pytest.mark.subprocess
@pytest.mark.slow
@pytest.mark.parametrize("after", [0.3, 0.8, 2.0, 3.5])
def test_a_stop_is_one_line_at_once(after: float, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\n\nclass Loop(torch.nn.Module):\n"
        "    def forward(self, x):\n        for i in range(10**6):\n"
        "            x = x.relu() if i % 5 else x + i\n        return x\n\n"
        "def build():\n    return Loop(), (torch.ones(2),)\n"
    )
    words = ["trace", "m.py:build", "--phase", "forward", "-o", "g.json"]
    place = tmp_path / "temporary"
    place.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "rooftrace", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(place)},
        preexec_fn=ctrl_c_works,
    ) as running:
        try:
            sleep(after)
            running.send_signal(signal.SIGINT)
            begin = monotonic()
            try:
                said = running.communicate(timeout=5)[1]
            except subprocess.TimeoutExpired:
                # Python drops an interrupt that comes inside of a weak reference's callback.
                running.send_signal(signal.SIGINT)
                said = running.communicate(timeout=30)[1].splitlines()[-1]
        finally:
            running.kill()
    if running.returncode == -signal.SIGINT and after < 0.5:
        pytest.skip("Python itself was not yet up")
    assert (running.returncode, said.strip()) == (130, "rooftrace: stopped")
    assert monotonic() - begin < 10  # a second on a machine that does nothing else
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.py", "temporary"]
    assert {path.name.partition("_")[0] for path in place.iterdir()} <= {"torchinductor"}
