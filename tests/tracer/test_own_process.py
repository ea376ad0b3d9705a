"""Functions in a process of their own, and what becomes of it when something ends."""

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace._progress import tell, telling
from rooftrace.errors import RequestError
from rooftrace.graph import GraphFileError
from rooftrace.scripts.steps import records
from rooftrace.tracer.phases import call_apart
from tests.conftest import ctrl_c_works

pytestmark = pytest.mark.quick


def ask_twice(ask: Any, number: int) -> bytes:
    tell(f"asking about {number}")
    return bytes(ask(b"%d" % number) + ask(b"!"))


def look(ask: Any) -> bytes:
    mask = os.umask(0)
    numbers = random.random()
    there = (os.getcwd(), os.environ.get("LOOK"), mask, sys.path[0], "tests" in sys.modules)
    stoppable = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return repr((*there, numbers, stoppable)).encode()


def refuse(ask: Any) -> bytes:
    raise RequestError("no such thing: 'x'")


def die(ask: Any) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def leave(ask: Any) -> bytes:
    os._exit(7)


def speak(ask: Any) -> bytes:
    print("out", end="")
    os.system("echo of a child")
    print("err", file=sys.stderr)
    return b""


def fail(ask: Any) -> bytes:
    raise ValueError("a fault of ours")


def test_it_asks_and_tells_and_answers() -> None:
    said: list[str] = []
    with telling(said.append):
        assert call_apart(ask_twice, 3, answer=lambda text: text * 2) == b"33!!"
    assert said == ["asking about 3"]


def test_it_is_where_the_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOK", "here")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = os.umask(0o037)
    try:
        first, second = (eval(call_apart(look)) for _ in range(2))
    finally:
        os.umask(before)
    assert first[:4] == (str(tmp_path), "here", 0o037, str(tmp_path))
    assert first[5] != second[5]  # random numbers are drawn anew
    assert first[6] == (signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)


def test_what_ends_it_is_said() -> None:
    with pytest.raises(RequestError, match="no such thing: 'x'"):
        call_apart(refuse)
    with pytest.raises(RequestError, match="killed by SIGKILL"):
        call_apart(die)
    with pytest.raises(RequestError, match="ended with code 7 before its result"):
        call_apart(leave)
    error = io.StringIO()
    with contextlib.redirect_stderr(error), pytest.raises(RequestError, match="ended with code 1"):
        call_apart(fail)
    assert "ValueError: a fault of ours" in error.getvalue()


def test_what_it_prints_comes_where_the_caller_prints(capfd: pytest.CaptureFixture[str]) -> None:
    out, err = io.StringIO(), io.StringIO()  # as of a notebook: no files
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        call_apart(speak)
    assert out.getvalue() in ("of a child\nout", "outof a child\n") and err.getvalue() == "err\n"
    call_apart(speak, stdout=sys.stderr)
    captured = capfd.readouterr()
    assert not captured.out and "of a child" in captured.err


def test_what_it_sends_is_checked() -> None:
    for content in (b"", b"x", b"\x92\xc4\x01x\x80", b"\x93\x01\x02\x03"):
        with pytest.raises(GraphFileError, match="the process of the script"):
            records.script_of(content)
        with pytest.raises(GraphFileError, match="the process of the script"):
            records.graph_of(content)


def wait_for(ask: Any, path: str) -> bytes:
    Path(path, "there").touch()
    end = time.monotonic() + 60
    while not Path(path, "go").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return os.environ["OMP_NUM_THREADS"].encode()


@pytest.mark.slow
def test_another_environment_ends_no_process_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch reads while it is imported has changed: another server forks from then on."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(call_apart, wait_for, str(tmp_path))
        while not (tmp_path / "there").exists() and not first.done():
            time.sleep(0.01)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        call_apart(look)
        time.sleep(0.2)
        (tmp_path / "go").touch()
        assert first.result() == b"1"


SLEEPS = """
import os, time
try:
    print("pid", os.getpid(), flush=True)
    time.sleep(60)
finally:
    print("finally", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_script_ends_with_the_command_that_runs_it(number: int, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    command = [sys.executable, "-m", "rooftrace", "run", "sleeps.py"]
    root = str(Path(rt.__file__).parents[1])
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=ctrl_c_works,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        pid = int(run.stdout.readline().split()[1])
        if number == signal.SIGINT:  # as the terminal sends it: to all that run there
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
        run.wait(30)
        wait_for_end(pid)
        if number == signal.SIGINT:
            assert run.returncode == 130 and "finally" in run.stdout.read()
            assert "Traceback" not in run.stderr.read()


def wait_for_end(pid: int) -> None:
    """Wait until a process is gone."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} goes on")
