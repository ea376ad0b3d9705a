"""Ways of writing a file, under a scratch folder: none changes what was there."""

import importlib
import json
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rooftrace.errors import RequestError
from rooftrace.scripts.launch import launched, scratch as landlock, understood
from rooftrace.scripts.launch.records import Ended
from rooftrace.scripts.launch.scratch import UNGUARDED, refusal
from rooftrace.scripts.steps import Script, ScriptError
from rooftrace.scripts.steps.records import Failure
from rooftrace.tracer.phases import call_apart

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a guarded process is forked"),
]
guarded = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")
NOBODY = 65534

WORKS = {
    "open w": "open('data', 'w').write('mine'); assert open('data').read() == 'mine'",
    "open a": "open('data', 'a').write('mine'); assert open('data').read() == 'datamine'",
    "open r+": "open('data', 'r+').write('M'); assert open('data').read() == 'Mata'",
    "open x": "open('new', 'x').write('mine'); assert open('new').read() == 'mine'",
    "io.open": "import io; io.open('data', 'w').write('m'); assert io.open('data').read() == 'm'",
    "_io.open": "import _io; _io.open('data', 'w').write('m'); assert open('data').read() == 'm'",
    "pathlib": """
from pathlib import Path
Path('data').write_text('mine'); Path('new').touch(); Path('data').touch()
assert Path('data').read_text() == 'mine' and Path('new').read_text() == ''
""",
    "os.open": """
import os
fd = os.open('data', os.O_WRONLY | os.O_TRUNC); os.write(fd, b'mine'); os.close(fd)
assert open('data').read() == 'mine'
""",
    "posix": """
import os, posix
fd = posix.open('data', os.O_WRONLY); posix.write(fd, b'M'); posix.close(fd)
assert open('data').read() == 'Mata'
posix.unlink('data'); posix.rename('folder', 'moved'); posix.mkdir('made')
assert sorted(os.listdir()) == ['base', 'link', 'made', 'moved', 'run.sh']
""",
    "dir_fd": """
import os
at = os.open('.', os.O_RDONLY)
fd = os.open('data', os.O_WRONLY, dir_fd=at); os.write(fd, b'M'); os.close(fd)
os.mkdir('made', dir_fd=at); os.unlink('link', dir_fd=at); os.rmdir('made', dir_fd=at)
os.rename('folder', 'moved', src_dir_fd=at, dst_dir_fd=at)
assert open('data').read() == 'Mata' and os.stat('moved', dir_fd=at)
assert sorted(os.listdir(at)) == ['base', 'data', 'moved', 'run.sh'] == sorted(os.listdir())
""",
    "dir_fd of a new folder": """
import os
os.makedirs('folder/below'); at = os.open('folder', os.O_RDONLY)
assert sorted(os.listdir(at)) == ['below', 'inside'] == sorted(e.name for e in os.scandir(at))
fd = os.open('inside', os.O_RDWR, dir_fd=at); os.write(fd, b'I'); os.close(fd)
assert open('folder/inside').read() == 'Inside'
assert [(dirs, files) for _, dirs, files, _ in os.fwalk('folder')][0] == (['below'], ['inside'])
""",
    "O_TMPFILE": """
import os
fd = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(fd, b'mine')
os.link(f'/proc/self/fd/{fd}', 'new'); assert open('new').read() == 'mine'
""",
    "a link of its own": """
import os
os.symlink('data', 'own'); open('own', 'w').write('mine')
assert open('data').read() == 'mine' and os.readlink('own') == 'data'
os.symlink(os.path.abspath('folder'), 'through'); open('through/inside', 'a').write('!')
assert open('folder/inside').read() == 'inside!'
assert {e.name for e in os.scandir() if e.is_dir()} == {'folder', 'through'}
""",
    "a link that is there": """
import os
open('link', 'w').write('mine'); assert open('data').read() == 'mine'
os.replace('link', 'moved'); assert os.readlink('moved') == 'data'
""",
    "links in a circle": """
import errno, os
os.symlink('b', 'a'); os.symlink('a', 'b')
try: open('a')
except OSError as error: assert error.errno == errno.ELOOP
else: raise AssertionError
""",
    "a hard link": """
import os
os.link('data', 'hard'); open('hard', 'w').write('mine')
assert open('hard').read() == 'mine' and open('data').read() == 'data'
""",
    "rename": """
import os
os.rename('data', 'moved'); os.replace('folder', 'else')
assert open('moved').read() == 'data' and sorted(os.listdir('else')) == ['inside']
assert not os.path.exists('data') and not os.path.exists('folder')
open('new', 'w').write('new'); os.mkdir('made'); os.replace('new', 'made/new')
assert open('made/new').read() == 'new'
""",
    "remove": """
import os, shutil
os.remove('data'); os.remove('link'); shutil.rmtree('folder')
assert sorted(os.listdir()) == ['base', 'run.sh']
open('data', 'w').write('mine'); assert open('data').read() == 'mine'
""",
    "rmdir": "import os; os.remove('folder/inside'); os.rmdir('folder'); os.mkdir('folder')",
    "truncate": "import os; os.truncate('data', 2); assert open('data').read() == 'da'",
    "what is known of a file": """
import os, stat
os.chmod('data', 0o600); os.utime('data', (1, 1)); os.chown('data', os.getuid(), os.getgid())
assert stat.S_IMODE(os.stat('data').st_mode) == 0o600 and os.stat('data').st_mtime == 1
with open('run.sh') as file:
    os.fchmod(file.fileno(), 0o640); os.utime(file.fileno(), (2, 2))
assert stat.S_IMODE(os.stat('run.sh').st_mode) == 0o640 and os.stat('run.sh').st_mtime == 2
""",
    "attributes": """
import os
try: os.setxattr('data', 'user.mine', b'1')
except OSError: raise SystemExit  # this file system has none
assert os.getxattr('data', 'user.mine') == b'1'
""",
    "a pipe": "import os; os.mkfifo('pipe'); assert 'pipe' in os.listdir()",
    "mmap": """
import mmap
with open('data', 'r+b') as file, mmap.mmap(file.fileno(), 0) as there: there[:4] = b'mine'
assert open('data').read() == 'mine'
""",
    "numpy": """
import numpy
there = numpy.memmap('data', mode='r+'); there[0] = 77; there.flush()
assert open('data').read() == 'Mata'
numpy.savez('new', a=numpy.arange(3)); assert numpy.load('new.npz')['a'].tolist() == [0, 1, 2]
""",
    "torch": """
import torch
torch.save({'w': torch.ones(2)}, 'data')
assert torch.load('data')['w'].tolist() == [1, 1] == torch.load('data', mmap=True)['w'].tolist()
""",
    "sqlite3, new": """
import sqlite3
with sqlite3.connect('new') as db: db.execute('create table t (x)')
assert sqlite3.connect('new').execute('select count(*) from t').fetchone() == (0,)
assert sqlite3.connect(':memory:').execute('select 1').fetchone() == (1,)
""",
    "sqlite3, there": """
import sqlite3
with sqlite3.connect('base') as db: db.execute("insert into t values ('mine')")
assert sqlite3.connect('base').execute('select x from t').fetchall() == [('there',), ('mine',)]
""",
    "archives": """
import bz2, gzip, os, tarfile, zipfile
for write in (bz2.open, gzip.open):
    with write('data', 'wb') as file: file.write(b'mine')
    assert write('data').read() == b'mine'
with zipfile.ZipFile('new.zip', 'w') as file: file.write('folder/inside')
zipfile.ZipFile('new.zip').extractall('out'); assert open('out/folder/inside').read() == 'inside'
with tarfile.open('new.tar', 'w') as file: file.add('folder')
tarfile.open('new.tar').extractall('out2'); assert open('out2/folder/inside').read() == 'inside'
""",
    "copies": """
import os, shutil
shutil.copy2('folder/inside', 'data'); shutil.copytree('folder', 'copy')
shutil.move('data', 'copy/data'); assert open('copy/data').read() == 'inside'
assert sorted(os.listdir('copy')) == ['data', 'inside']
""",
    "dbm": """
import shelve
with shelve.open('shelf', flag='n') as file: file['x'] = 1
with shelve.open('shelf') as file: assert file['x'] == 1
""",
    "logging": """
import logging
logging.basicConfig(filename='data', force=True); logging.warning('said')
assert 'said' in open('data').read()
""",
    "a module that it wrote": """
import os, sys
open('written_module.py', 'w').write('x = 5')
sys.path.insert(0, os.getcwd())
import written_module
assert written_module.x == 5
""",
    "a working folder of its own": """
import os
before = os.getcwd()
os.makedirs('out/a'); os.chdir('out/a'); open('new', 'w').write('mine')
assert os.getcwd() == f'{before}/out/a' and open('../../data').read() == 'data'
open('../../data', 'w').write('mine'); os.chdir('../..')
assert open('data').read() == 'mine' and open('out/a/new').read() == 'mine'
assert os.getcwd() == before
""",
    "temporary files": """
import os, subprocess, tempfile
from pathlib import Path
with tempfile.TemporaryDirectory() as folder:
    Path(folder, 'x').write_text('x'); os.makedirs(f'{folder}/a/b'); Path(folder, 'a/y').touch()
    assert sorted(os.listdir(folder)) == ['a', 'x']
assert not os.path.exists(folder)
with tempfile.NamedTemporaryFile('w', dir='.') as file: assert os.path.exists(file.name)
assert tempfile.TemporaryFile().write(b'x') == tempfile.TemporaryFile(dir='.').write(b'x') == 1
made = subprocess.check_output(['mktemp'], text=True).strip()
assert made.startswith(os.environ['TMPDIR'])
""",
    "shared memory": """
import multiprocessing
multiprocessing.Lock()
open('/dev/shm/rooftrace-test', 'w').write('x')
assert open('/dev/shm/rooftrace-test').read() == 'x'
import subprocess
assert subprocess.run(['test', '-e', '/dev/shm/rooftrace-test']).returncode == 1
""",
    "shared memory of a name": """
from multiprocessing.shared_memory import SharedMemory
there = SharedMemory(create=True, size=9); there.close(); there.unlink()
""",
    "devices that keep nothing": """
import os
open('/dev/null', 'w').write('x'); assert os.system('echo x > /dev/null') == 0
""",
    "a process that it forks": """
import os
if not os.fork():
    open('data', 'w').write('mine'); os._exit(0)
os.wait(); assert open('data').read() == 'mine'
""",
}
"""A program for each way that works."""

C = """
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
def tried(answer):
    if answer < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
tried({})
"""
SHELL = "import subprocess; subprocess.run({!r}, shell=True, check=True)"
REFUSED = {
    **{
        f"C: {call}": C.format(f"c.{call}")
        for call in (
            "open(b'data', os.O_WRONLY)",
            "open(b'data', os.O_RDONLY | os.O_TRUNC)",
            "open(b'new', os.O_CREAT, 0o600)",
            "open(b'.', os.O_TMPFILE | os.O_RDWR, 0o600)",
            "creat(b'new', 0o600)",
            "truncate(b'data', ctypes.c_long(0))",
            "unlink(b'data')",
            "rename(b'data', b'moved')",
            "link(b'data', b'hard')",
            "symlink(b'data', b'soft')",
            "mkdir(b'made', 0o700)",
            "mkfifo(b'pipe', 0o600)",
            "rmdir(b'folder')",
            "link(b'data', (os.environ['TMPDIR'] + '/hard').encode())",
            "rename(b'data', (os.environ['TMPDIR'] + '/moved').encode())",
        )
    },
    **{
        f"shell: {command}": SHELL.format(command)
        for command in (
            "echo mine > data",
            "echo mine >> data",
            "sh run.sh",
            "cp run.sh data",
            "mv data moved",
            "mv data $TMPDIR/moved",
            "rm data",
            "ln -f run.sh data",
            "ln data $TMPDIR/hard && echo mine > $TMPDIR/hard",
            "ln -s $PWD/data $TMPDIR/soft && echo mine > $TMPDIR/soft",
            "sed -i s/d/m/ data",
            "dd if=/dev/zero of=data conv=notrunc count=1",
            "mkdir made",
        )
    },
    "os.system": "import os\nif os.system('echo mine > data'): raise OSError('Permission denied')",
    "os.posix_spawn": """
import os
child = os.posix_spawn('/bin/sh', ['sh', 'run.sh'], os.environ)
if os.waitpid(child, 0)[1]: raise OSError('Permission denied')
""",
    "io.FileIO": "import io; io.FileIO('data', 'w')",
    "_io.FileIO": "import _io; _io.FileIO('new', 'w')",
    "a descriptor, opened again": """
file = open('data'); open(f'/proc/self/fd/{file.fileno()}', 'w')
""",
    "sqlite3, by URI": """
import sqlite3
sqlite3.connect('file:base?mode=rw', uri=True).execute("insert into t values ('mine')")
""",
    "pyarrow": """
import pyarrow.parquet
pyarrow.parquet.write_table(pyarrow.table({'a': [1]}), 'new')
""",
    "a socket": "import socket; socket.socket(socket.AF_UNIX).bind('socket')",
}
"""A program for each way that the kernel refuses."""


def told(script: str, work: Path, scratch: Path, *how: int | None) -> dict[str, Any]:
    """Run a program, guarded, in a process of its own: how it ended, and what was said."""
    made: dict[str, Any] = json.loads(call_apart(_in_child, script, work, scratch, *how))
    return made


def _in_child(
    ask: Any, script: str, work: Path, scratch: Path, user: int | None, version: int | None
) -> bytes:
    if version is not None:
        vars(landlock)["version"] = lambda: version
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 2)
    if user is not None:
        _import_all()
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    line = understood([script], str(work))
    return launched(line, scratch=scratch)(_said)


def _said(ended: Ended) -> bytes:
    error = ended.exception
    answer = {
        "error": "" if error is None else f"{type(error).__name__}: {error}",
        "refusal": dict(ended.assumed).get("refused", ""),
        "said": dict(ended.assumed).get("scratch", ""),
        "user": os.getuid(),
    }
    return json.dumps(answer).encode()


def _import_all() -> None:
    """What programs import: another user may not read it."""
    for name in (
        *("dbm.dumb", "shelve", "multiprocessing.shared_memory", "tarfile", "safetensors.numpy"),
        *("safetensors.torch", "sqlite3", "torch.distributed.launcher.api", "torch.cuda.nvtx"),
        *("rooftrace.scripts.launch.scratch", "multiprocessing.resource_tracker"),
        *("encodings.cp437", "encodings.latin_1", "encodings.ascii"),
    ):
        importlib.import_module(name)


def state(folder: Path) -> dict[str, Any]:
    """All that is known of the files below a folder."""
    known: dict[str, Any] = {}
    for path in [folder, *folder.rglob("*")]:
        known_of = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(known_of.st_mode) else None
        attributes = os.listxattr(path, follow_symlinks=False) if hasattr(os, "listxattr") else []
        known[str(path.relative_to(folder))] = (
            *(
                known_of.st_mode,
                known_of.st_uid,
                known_of.st_gid,
                known_of.st_nlink,
                known_of.st_mtime_ns,
            ),
            *(content, attributes, os.readlink(path) if path.is_symlink() else None),
        )
    return known


@pytest.fixture(
    params=[None, pytest.param(NOBODY, marks=pytest.mark.slow)], ids=["", "another user"]
)
def user(request: pytest.FixtureRequest) -> int | None:
    if request.param is not None and os.getuid():
        pytest.skip("only root becomes another user")
    made: int | None = request.param
    return made


@pytest.fixture
def work(user: int | None) -> Iterator[Path]:
    """A folder with files, and `scratch` and `t.py` beside it; the user's own."""
    folder = Path(os.path.realpath(tempfile.mkdtemp(dir=None if user is None else "/tmp")))
    there = folder / "work"
    (there / "folder").mkdir(parents=True)
    for name, text in (("data", "data"), ("folder/inside", "inside"), ("run.sh", "echo mine>data")):
        (there / name).write_text(text)
    (there / "link").symlink_to("data")
    with sqlite3.connect(there / "base") as base:
        base.execute("create table t (x)")
        base.execute("insert into t values ('there')")
    base.close()
    (folder / "scratch").mkdir()
    for path in [folder, *folder.rglob("*")]:
        if user is not None:
            os.chown(path, user, user, follow_symlinks=False)
    yield there
    shutil.rmtree(folder)


def ran(
    text: str, work: Path, user: int | None = None, version: int | None = None
) -> dict[str, Any]:
    (work.parent / "t.py").write_text(text)
    before = state(work)
    made = told(str(work.parent / "t.py"), work, work.parent / "scratch", user, version)
    assert state(work) == before
    assert sorted(os.listdir(work.parent)) == ["scratch", "t.py", "work"]
    assert made["user"] == (os.getuid() if user is None else user)
    return made


@guarded
@pytest.mark.parametrize("way", WORKS)
def test_a_way_of_writing_works_and_changes_nothing_that_was_there(
    way: str, work: Path, user: int | None
) -> None:
    if user is not None and way in ("shared memory of a name", "a module that it wrote", "dbm"):
        pytest.skip("another user may not be able to read Python's files")
    made = ran(WORKS[way], work, user)
    assert made["error"] == ""


@guarded
@pytest.mark.parametrize("way", REFUSED)
def test_a_way_of_writing_is_refused_and_the_error_says_why(
    way: str, work: Path, user: int | None
) -> None:
    if way == "pyarrow":
        pytest.importorskip("pyarrow.parquet")
    made = ran(REFUSED[way], work, user)
    assert made["error"] and not made["error"].startswith(("NameError", "AssertionError"))
    assert "--scratch lets nothing be written outside of" in made["refusal"]
    assert str(work.parent / "scratch") in made["refusal"]


OLDER = """
import os
os.makedirs('made'); os.replace('data', 'made/data'); assert open('made/data').read() == 'data'
os.rename('folder', 'made/folder'); assert os.listdir('made/folder') == ['inside']
"""


@guarded
@pytest.mark.parametrize("version", [1, 2])
def test_an_older_landlock_refuses_the_same_and_what_it_lets_through_is_said(
    version: int, work: Path
) -> None:
    assert ran(OLDER, work, version=version)["error"] == ""
    made = ran(REFUSED["shell: mv data $TMPDIR/moved"], work, version=version)
    assert made["error"] and "truncate(2)" in made["said"]


def test_without_landlock_the_result_says_first_what_is_not_caught(
    work: Path,
) -> None:
    made = ran("open('data', 'w').write('mine')", work, version=0)
    assert made == {"error": "", "refusal": "", "said": UNGUARDED, "user": os.getuid()}


@guarded
def test_an_error_that_is_not_of_the_guard_says_nothing_of_it(work: Path) -> None:
    assert ran("open('/not/there', 'w')", work, None)["refusal"] == ""
    assert ran("raise ValueError('mine')", work, None)["refusal"] == ""
    assert refusal(PermissionError(13, "Permission denied", "data")) == ""  # nothing is guarded


def test_the_error_of_a_script_says_what_refused_it() -> None:
    script = Script(
        name="t.py",
        graphs=(),
        stretches=(),
        ended="error",
        said={"refused": "--scratch lets ..."},
        failure=Failure("PermissionError", "no"),
    )
    assert str(ScriptError(script)).endswith("PermissionError: no; --scratch lets ...")


@guarded
def test_a_guard_is_refused_where_other_threads_would_go_on(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="several"):
            landlock.guard(tmp_path)
    finally:
        stop.set()
        thread.join()


def test_a_scratch_folder_that_holds_the_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "t.py").write_text("")
    work = tmp_path / "work"
    for folder in (tmp_path, work, tmp_path / "scratch" / ".." / "work"):
        with pytest.raises(RequestError, match="scratch folder"):
            told(str(work / "t.py"), work, folder, None, None)
