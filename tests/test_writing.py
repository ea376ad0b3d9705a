"""What is written is whole or not there, wherever the process dies; nothing hidden stays."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rooftrace import _writing
from rooftrace._writing import aside, put_folder, write_bytes


def dies_at(step: int, work: Callable[[], None]) -> bool:
    """Run `work` in a fork that is killed before line `step` of _writing; whether it was killed."""
    child = os.fork()
    if not child:
        left = step

        def watch(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename != _writing.__file__:
                return None
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return watch

        sys.settrace(watch)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


def new_report(out: Path, text: str) -> None:
    with aside(out.parent) as folder:
        made = folder / "report"
        made.mkdir()
        for name in ("a", "b"):
            (made / name).write_text(text)
        put_folder(made, out)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a fork")
def test_a_file_is_the_old_or_the_new_one_wherever_the_process_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(_writing, "_OLD", 0.0)  # a folder that never got its lock is left, too
    path, step = tmp_path / "file", 0
    path.write_text("old")
    while dies_at(step, lambda: write_bytes(path, b"new")):
        assert path.read_text() in ("old", "new")
        write_bytes(path, b"old")
        assert not hidden(tmp_path)
        step += 1
    assert step > 20, "the child was killed at every line"
    assert path.read_text() == "new"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a fork")
def test_a_folder_is_exchanged_as_a_whole_wherever_the_process_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(_writing, "_OLD", 0.0)
    out, step = tmp_path / "out", 0
    new_report(out, "old")
    (out / "mine").write_text("mine")
    (out / "inner").mkdir()
    while dies_at(step, lambda: new_report(out, "new")):
        with aside(tmp_path):
            pass  # the next run, before it writes anything
        assert not hidden(tmp_path)
        assert {(out / name).read_text() for name in ("a", "b")} in ({"old"}, {"new"})
        assert sorted(os.listdir(out)) == ["a", "b", "inner", "mine"]
        new_report(out, "old")
        step += 1
    assert step > 30, "the child was killed at every line"


def test_what_another_process_is_making_is_left_alone(tmp_path):
    with aside(tmp_path) as other:
        (other / "file").write_text("being made")
        write_bytes(tmp_path / "mine", b"x")
        assert (other / "file").read_text() == "being made"
    assert os.listdir(tmp_path) == ["mine"]


def test_what_was_left_never_leads_out_of_its_folder(tmp_path):
    inner = tmp_path / "inner"
    left = inner / f"{_writing._HIDDEN}x"
    (left / "old").mkdir(parents=True)
    (left / "old" / "evil").write_text("")
    (left / "place").write_text("../elsewhere")
    (left / "lock").write_text("")
    write_bytes(inner / "mine", b"x")
    assert sorted(os.listdir(tmp_path)) == ["inner"]


def test_a_link_stays_a_link_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    write_bytes(Path(os.devnull), b"gone")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("made", ["missing/file", "a folder"])
def test_an_error_names_the_file_that_was_asked_for(made, tmp_path):
    (tmp_path / "missing").write_text("in the way")
    (tmp_path / "a folder").mkdir()
    with pytest.raises(OSError, match=made):
        write_bytes(tmp_path / made, b"x")


def test_the_working_folder_is_filled_and_not_exchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("old")
    new_report(tmp_path, "new")
    assert Path("a").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
