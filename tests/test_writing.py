"""What is written is whole or not there, wherever the process dies; nothing else is touched."""

import contextlib
import errno
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rooftrace import _writing
from rooftrace._writing import aside, put_files, write_bytes
from rooftrace.errors import RequestError

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a fork")
MANIFEST = "_set.json"


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


def shown(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith(".rooftrace-"))


def new_set(out: Path, text: str, names: tuple[str, ...] = ("a", "b")) -> None:
    """Put files with one text into `out`, as a report does."""
    out.mkdir(exist_ok=True)
    with aside(out) as made:
        for name in names:
            (made / name).write_text(text)
        put_files(made, out, MANIFEST)


def is_whole(out: Path) -> bool:
    """Whether the manifest says that the set is whole, which its digests confirm."""
    told = json.loads((out / MANIFEST).read_bytes())
    if not told["complete"]:
        return False
    return all(
        hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
        for name, digest in told["files"].items()
    )


# -- kills, failures, others at work ---------------------------------------------------------------


@pytest.mark.slow
@FORKS
def test_a_file_is_the_old_or_the_new_one_wherever_the_process_is_killed(tmp_path):
    path, step = tmp_path / "file", 0
    path.write_text("old")
    while dies_at(step, lambda: write_bytes(path, b"new")):
        assert path.read_text() in ("old", "new")
        write_bytes(path, b"old")
        assert shown(tmp_path) == ["file"]
        step += 1
    assert step > 10, "the child was killed at every line"
    assert path.read_text() == "new"


@pytest.mark.slow
@FORKS
def test_a_mixed_set_is_told_wherever_the_process_is_killed(tmp_path):
    out, step, mixed = tmp_path / "out", 0, 0
    new_set(out, "old")
    (out / "mine").write_text("mine")
    (out / "inner").mkdir()
    while dies_at(step, lambda: new_set(out, "new")):
        texts = {(out / name).read_text() for name in ("a", "b")}
        assert texts <= {"old", "new"}
        assert len(texts) == 1 or not is_whole(out)
        mixed += len(texts) == 2
        assert shown(out) == [MANIFEST, "a", "b", "inner", "mine"]
        new_set(out, "old")
        assert is_whole(out)
        step += 1
    assert step > 30 and mixed, "the child was killed at every line"


@FORKS
def test_a_signal_while_files_are_made_leaves_nothing(tmp_path):
    """A command that SIGTERM ends takes its hidden folder away."""
    code = f"""if True:
        import sys, time, pathlib
        from rooftrace._writing import aside
        from rooftrace.reporting import cli
        def main():
            with aside(pathlib.Path({str(tmp_path)!r})):
                print("there", flush=True)
                time.sleep(60)
        cli.main = main
        cli.run()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        assert os.listdir(tmp_path)
        process.send_signal(signal.SIGTERM)
    assert process.returncode
    assert not os.listdir(tmp_path)


def test_what_another_process_left_or_is_making_is_never_touched(tmp_path):
    """A clone can carry such a folder: with links, a name of .git, whatever its files say."""
    private = tmp_path / "private"
    private.mkdir()
    (private / "diary").write_text("mine")
    clone = tmp_path / "clone"
    left = clone / ".rooftrace-x"
    left.mkdir(parents=True)
    (left / "lock").touch()
    (left / "place").write_text("loot")
    (left / "old").symlink_to("../../private")
    old = time.time() - 10 * 24 * 3600
    os.utime(left, (old, old))
    write_bytes(clone / "chips.md", b"x")
    new_set(clone, "x")
    with aside(clone):
        pass
    assert sorted(os.listdir(left)) == ["lock", "old", "place"]
    assert sorted(os.listdir(clone)) == [".rooftrace-x", MANIFEST, "a", "b", "chips.md"]
    assert (private / "diary").read_text() == "mine"


@FORKS
def test_a_fork_that_ends_does_not_clean_for_its_parent(tmp_path):
    with aside(tmp_path) as made:
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                raise SystemExit
        else:
            os.waitpid(child, 0)
            assert made.is_dir()
    if not child:
        os._exit(0)
    assert not os.listdir(tmp_path)


WRITER = """
import os, sys
os.chdir(sys.argv[1])
number = 0
while not os.path.exists("../stop"):
    with open(f"step-{number}", "x") as file:
        file.write(str(number))
    number += 1
    if number == 100:
        print("ready", flush=True)
print(number)
"""


@contextlib.contextmanager
def at_work(out: Path) -> Iterator[list[int]]:
    """A process that works in `out` and makes files by short names; how many, at the end."""
    command = [sys.executable, "-c", WRITER, str(out)]
    made: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield made
        finally:
            (out.parent / "stop").touch()
        made.append(int(process.stdout.read()))


def test_a_process_that_works_in_the_folder_loses_nothing(tmp_path):
    out = tmp_path / "out"
    new_set(out, "old")
    place = out.stat().st_ino
    with at_work(out) as made:
        for text in ("one", "two"):
            new_set(out, text)
    assert made[0] >= 100 and out.stat().st_ino == place
    assert len([name for name in os.listdir(out) if name.startswith("step-")]) == made[0]
    assert is_whole(out) and (out / "a").read_text() == "two"


@FORKS
def test_sets_of_several_processes_at_a_time_do_not_mix(tmp_path):
    out, names = tmp_path / "out", tuple("abcdef")
    children = []
    for text in ("1", "2", "3"):
        children.append(os.fork())
        if not children[-1]:
            for _ in range(20):
                new_set(out, text, names)
            os._exit(0)
    while children:
        assert os.waitpid(children.pop(), 0)[1] == 0
    assert is_whole(out)
    assert len({(out / name).read_text() for name in names}) == 1
    assert sorted(os.listdir(out)) == [MANIFEST, *names]


def test_files_of_an_earlier_set_stay_and_are_named(tmp_path):
    new_set(tmp_path, "1", ("a", "b", "c"))
    new_set(tmp_path, "2", ("a",))
    told = json.loads((tmp_path / MANIFEST).read_bytes())
    assert list(told["files"]) == ["a"] and told["earlier"] == ["b", "c"]
    assert (tmp_path / "b").read_text() == "1"
    new_set(tmp_path, "3", ("b",))  # still known as a file of rooftrace
    assert (tmp_path / "b").read_text() == "3"


def test_a_full_disk_leaves_the_old_file_and_nothing_hidden(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_writing.os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*file'"):
        write_bytes(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


# -- what stands in the way ------------------------------------------------------------------------


@pytest.mark.parametrize("leads", ["target", "nowhere", "folder"])
def test_a_link_is_refused_and_what_it_leads_to_stays(leads, tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / leads)
    for work in (
        lambda: write_bytes(tmp_path / "a", b"new"),
        lambda: new_set(tmp_path, "new"),
    ):
        with pytest.raises(RequestError, match=rf"a' is a link to '.*{leads}': name that file"):
            work()
    assert sorted(os.listdir(tmp_path)) == ["a", "folder", "target"]
    assert (tmp_path / "target").read_text() == "old"


def test_a_folder_is_reached_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    new_set(tmp_path / "out", "new")
    assert (tmp_path / "out").is_symlink() and is_whole(tmp_path / "real")


def test_a_folder_with_the_name_of_an_output_is_refused_before_anything_is_put(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("mine")
    with pytest.raises(RequestError, match="b' is a folder"):
        new_set(tmp_path, "new")
    assert os.listdir(tmp_path) == ["b"] and (tmp_path / "b" / "thesis.tex").exists()


def test_a_file_of_the_user_with_the_name_of_an_output_is_refused(tmp_path):
    (tmp_path / "b").write_text("mine")
    with pytest.raises(RequestError, match=r"b' is there, and is not what rooftrace writes"):
        new_set(tmp_path, "new")
    assert (tmp_path / "b").read_text() == "mine" and not (tmp_path / "a").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_written_to_but_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(RequestError, match="a' is no plain file"):
        new_set(tmp_path, "new")
    reader = os.open(tmp_path / "a", os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(tmp_path / "a", b"new")
    assert os.read(reader, 10) == b"new" and stat.S_ISFIFO((tmp_path / "a").stat().st_mode)
    os.close(reader)


def test_a_device_and_stdout_are_written_to_as_they_are(tmp_path):
    write_bytes(Path(os.devnull), b"gone")
    assert not Path(os.devnull).is_file()
    if not os.path.exists("/dev/stdout"):
        pytest.skip("needs /dev/stdout")
    code = "from pathlib import Path; import rooftrace._writing as w; "
    code += "w.write_bytes(Path('/dev/stdout'), b'said')"
    with (tmp_path / "file").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert (tmp_path / "file").read_bytes() == b"said"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"said"


def test_another_name_of_the_same_file_keeps_the_old_contents(tmp_path):
    (tmp_path / "a").write_text("old")
    os.link(tmp_path / "a", tmp_path / "other")
    write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "other").read_text() == "old"


@pytest.mark.skipif(os.name == "nt", reason="needs permissions of POSIX")
def test_permissions_stay_and_a_read_only_file_is_refused(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o4640)
    write_bytes(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640  # no file of ours runs as another user
    path.chmod(0o444)
    with pytest.raises(RequestError, match="a' is read-only"):
        write_bytes(path, b"newer")
    assert path.read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs a second user")
def test_the_file_of_another_user_stays_theirs(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    os.chown(path, 12345, 12345)
    write_bytes(path, b"new")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12345)


@pytest.mark.parametrize("made", ["missing/file", "a folder"])
def test_an_error_names_the_file_that_was_asked_for(made, tmp_path):
    (tmp_path / "missing").write_text("in the way")
    (tmp_path / "a folder").mkdir()
    with pytest.raises((OSError, RequestError), match=made):
        write_bytes(tmp_path / made, b"x")


def test_a_damaged_manifest_knows_no_file(tmp_path):
    new_set(tmp_path, "1")
    for damage in (b"", b'{"schema": "rooftrace.files/1", "files": 3, "earlier": []}', b"[" * 9999):
        (tmp_path / MANIFEST).write_bytes(damage)
        with pytest.raises(RequestError):
            new_set(tmp_path, "2")
        assert (tmp_path / "a").read_text() == "1"
