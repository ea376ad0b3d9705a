"""A function runs in a separate process, forked from one that has torch and nothing else.

Importing torch takes seconds, forking a process that has done it takes milliseconds.  So the first
call starts a server, which imports what the functions need, and forks for each call a process that
has the caller's environment, folder, standard streams and `sys.path`, and nothing that the caller
has imported or changed.  The server ends with the process that started it.

What the caller sends is pickled: both sides are of one user and one program.  What comes back is
bytes, which the caller reads as it reads a file: the process may have run anything.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rooftrace._processes import ONE_TASK
from rooftrace._progress import tell, telling
from rooftrace.errors import RequestError

Answer = Callable[[bytes], bytes]
"""The caller's answer to a question of the process."""

_TOLD, _ASKED, _RESULT, _REFUSED = b"t", b"?", b"=", b"!"
_PRELOADED = (
    *("rooftrace.scripts.steps.running", "rooftrace.tracer.phases.worker"),
    *("rooftrace.tracer.inputs", "rooftrace.tracer.phases.running", "rooftrace.tracer.targets"),
)
"""Modules that the server imports."""
_READ_BY_IMPORTS = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "LD_")
"""How variables begin that are read while Python starts or torch is imported."""
_STOPPED = 128 + signal.SIGINT
"""The exit code of a process that Ctrl-C ended."""
_HEAD = struct.Struct(">cQ")
_END = os._exit  # a function may put something else in its place
_MOMENT = 0.05
"""Seconds between two looks at whether processes go on."""
_SOON, _GRACE = 0.5, 5.0
"""Seconds in which a process ends by itself, and in which one may end on request."""


class ProcessEndedError(RequestError):
    """The process has ended before it had a result.  code: with which; less than 0: by a signal."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Channel:
    """One end of the connection between a caller and its process: messages with a kind."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rwb")
        self._lock = threading.RLock()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a message; raises OSError where nobody is there."""
        with self._lock:
            self._file.write(_HEAD.pack(kind, len(content)) + content)
            self._file.flush()

    def receive(self) -> tuple[bytes, bytes]:
        """The next message: its kind and its content; ("", "") where the other side has ended."""
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return b"", b""
        kind, size = _HEAD.unpack(head)
        content = self._file.read(size)
        return (kind, content) if len(content) == size else (b"", b"")

    def ask(self, question: bytes) -> bytes:
        """Ask the caller; return the answer."""
        with self._lock:
            self.send(_ASKED, question)
            return self.receive()[1]

    def close(self) -> None:
        """Nothing more is sent or received."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._end.close()


def call_apart(
    function: Callable[..., bytes] | str,
    *arguments: Any,
    answer: Answer | None = None,
    stdout: Any = None,
) -> bytes:
    """Call a function in a separate process: `function(ask, *arguments)`; its result.

    function: of a module, found by its name; or that name, "module:function".  arguments: are
    pickled.  answer: the result of `ask` for its bytes.  stdout: where the process prints; default
    `sys.stdout`.

    What the function says with `tell` is said here.  Raises RequestError with the text of one that
    it raises, and ProcessEndedError where the process ends otherwise.
    """
    request = _Request.here(function, arguments)
    with _streams(stdout) as streams, _server().process(request, streams) as started:
        while True:
            kind, content = started.channel.receive()
            if kind == _TOLD:
                tell(content.decode())
            elif kind == _ASKED and answer is not None:
                started.channel.send(_ASKED, answer(content))
            elif kind == _RESULT:
                return content
            elif kind == _REFUSED:
                raise RequestError(content.decode())
            else:
                raise started.ending()


def get_ready() -> None:
    """Start the server if none runs: it imports torch in parallel to this process."""
    _server()


@dataclass(frozen=True)
class _Request:
    """The function that a process calls, and its folder.  name: "module:function"."""

    name: str
    arguments: bytes
    environment: Mapping[str, str]
    folder: str
    path: tuple[str, ...]
    umask: int
    stoppable: bool  # Ctrl-C is not ignored, as in the background of a shell

    @classmethod
    def here(cls, function: Callable[..., bytes] | str, arguments: tuple[Any, ...]) -> _Request:
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(
            name=function,
            arguments=pickle.dumps(arguments),
            environment=dict(os.environ),
            folder=os.getcwd(),
            path=tuple(sys.path),
            umask=umask,
            stoppable=signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        )


# -- the caller ------------------------------------------------------------------------------------


class _Started:
    """A process that runs.  channel: to it.  status: tells its number, and how it has ended."""

    def __init__(self, channel: Channel, status: io.BufferedReader) -> None:
        self.channel, self._status = channel, status
        self._pid = int.from_bytes(status.read(4), "big")

    def ending(self) -> ProcessEndedError:
        """How it has ended.  Raises KeyboardInterrupt where Ctrl-C ended it."""
        status = self._status.read(4)
        if len(status) < 4:
            text = "the process of the script was killed, with the one that started it"
            return ProcessEndedError(text, -signal.SIGKILL)
        code = int.from_bytes(status, "big", signed=True)
        if code in (_STOPPED, -signal.SIGINT):
            raise KeyboardInterrupt
        text = f"the process of the script ended with code {code} before its result was there"
        if code < 0:
            with contextlib.suppress(ValueError):
                text = f"the process of the script was killed by {signal.Signals(-code).name}"
        return ProcessEndedError(text, code)

    def end(self) -> None:
        """Wait until it has ended: it gets a request, and is killed, if it goes on."""
        self.channel.close()
        with self._status:
            for patience, number in ((_SOON, signal.SIGTERM), (_GRACE, signal.SIGKILL)):
                if select.select([self._status], [], [], patience)[0] or not self._pid:
                    break
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self._pid, number)
            self._status.read()


class _Server:
    """The process that forks.  key: the files and settings that it read at its start."""

    def __init__(self, key: Any) -> None:
        self.key = key
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
            f"from {__name__} import serve; serve({theirs.fileno()})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )
        self._end = ours
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether it runs, and was started by this process."""
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """It forks no more, and ends with the last of its processes."""
        self._end.close()

    def end(self) -> None:
        """It ends now, and its processes with it."""
        if self.usable:
            self.close()
            self._process.terminate()
            self._process.wait()

    @contextlib.contextmanager
    def process(self, request: _Request, streams: tuple[int, int, int]) -> Iterator[_Started]:
        """Inside, a process runs a request."""
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        with theirs, open(writing, "wb"), self._lock:
            socket.send_fds(self._end, [b"+"], [theirs.fileno(), writing, *streams])
        channel = Channel(ours)
        channel.send(_ASKED, pickle.dumps(request))
        started = _Started(channel, open(reading, "rb"))  # noqa: SIM115  # closed by `end`
        try:
            yield started
        finally:
            started.end()


_SERVERS: list[_Server] = []
_LOCK = threading.Lock()


def _server() -> _Server:
    """The server of this process; another one where its key has changed."""
    if not hasattr(os, "fork"):
        raise RequestError("a script runs in a process that is forked: this system cannot fork")
    key = {n: v for n, v in os.environ.items() if n.startswith(_READ_BY_IMPORTS)}, sys.executable
    with _LOCK:
        if _SERVERS and not (_SERVERS[0].usable and _SERVERS[0].key == key):
            _SERVERS.pop().close()
        if not _SERVERS:
            _SERVERS.append(_Server(key))
        return _SERVERS[0]


@atexit.register
def end_processes() -> None:
    """End the server now, and every process that it has forked."""
    for server in _SERVERS:
        server.end()


@contextlib.contextmanager
def _streams(stdout: Any = None) -> Iterator[tuple[int, int, int]]:
    """The descriptors of standard input, output and errors for a process.

    A stream of Python's that is no file, as that of a notebook, gets the output of a pipe.
    """
    with contextlib.ExitStack() as undo:
        stdin = _descriptor(sys.stdin)
        if stdin is None:
            stdin = os.open(os.devnull, os.O_RDONLY)
            undo.callback(os.close, stdin)
        outputs = [_output(stream, undo) for stream in (stdout or sys.stdout, sys.stderr)]
        yield (stdin, *outputs)  # type: ignore[misc]


def _descriptor(stream: Any) -> int | None:
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _output(stream: Any, undo: contextlib.ExitStack) -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    descriptor = _descriptor(stream)
    if descriptor is not None:
        return descriptor
    reading, writing = os.pipe()

    def pump() -> None:
        with open(reading, encoding="utf-8", errors="backslashreplace", newline="") as pipe:
            for text in iter(lambda: pipe.readline(), ""):
                if stream is not None:
                    stream.write(text)

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    undo.callback(thread.join, _GRACE)  # a child of the script may keep the pipe open
    undo.callback(os.close, writing)
    return writing


# -- the server ------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Fork a process for each request that comes, until the caller closes it or is gone."""
    import gc
    import importlib

    caller = os.getppid()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    ONE_TASK.append("server")
    for name in _PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of the terminal is for the processes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that keep them
    gc.freeze()
    with socket.socket(fileno=descriptor) as end:
        while True:
            message, descriptors, _, _ = socket.recv_fds(end, 1, 5)
            if not message:
                break
            if not os.fork():
                end.close()
                _keep(descriptors)
            for each in descriptors:
                os.close(each)
    with contextlib.suppress(ChildProcessError):  # there is none any more
        while os.getppid() == caller:
            os.waitpid(-1, os.WNOHANG)
            time.sleep(_MOMENT)


def _keep(descriptors: list[int]) -> NoReturn:
    """Fork the process of a request, and tell the caller its number and how it has ended."""
    channel, status, *streams = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent()
    pid = os.fork()
    if not pid:
        os.close(status)
        _end_with_parent()
        _work(channel, streams)
    os.close(channel)
    for each in streams:
        os.close(each)
    os.write(status, pid.to_bytes(4, "big"))
    _, ended = os.waitpid(pid, 0)
    os.write(status, os.waitstatus_to_exitcode(ended).to_bytes(4, "big", signed=True))
    _END(0)


def _end_with_parent() -> None:
    """Have the kernel end this process with the one that forked it, where it can."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _work(descriptor: int, streams: list[int]) -> NoReturn:
    """Be the process of a request."""
    code = 1
    try:
        for number, each in enumerate(streams):
            os.dup2(each, number)
            os.close(each)
        channel = Channel(socket.socket(fileno=descriptor))
        _CHANNELS.append(channel)
        request: _Request = pickle.loads(channel.receive()[1])
        _be_there(request)
        code = _answered(channel, request)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        _END(code)


def _answered(channel: Channel, request: _Request) -> int:
    """Call the function, and end with its result; the exit code where it returns nothing."""
    import importlib

    module, _, name = request.name.partition(":")
    home: Any = importlib.import_module(module)
    for part in name.split("."):
        home = getattr(home, part)

    def send(text: str) -> None:
        channel.send(_TOLD, text.encode("utf-8", "backslashreplace"))

    try:
        with telling(send):
            result = home(channel.ask, *pickle.loads(request.arguments))
    except RequestError as error:
        channel.send(_REFUSED, str(error).encode("utf-8", "backslashreplace"))
        return 1
    except KeyboardInterrupt:
        return _STOPPED
    leave_with(result)


_CHANNELS: list[Channel] = []
"""That of this process, to who has called its function."""


def leave_with(result: bytes) -> NoReturn:
    """End this process now, with its function's result."""
    _CHANNELS[0].send(_RESULT, result)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    _END(0)


def _be_there(request: _Request) -> None:
    """Make this process one that has just started where the caller is."""
    if request.stoppable:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.umask(request.umask)
    sys.path[:] = request.path
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # as Python's random numbers, seeded anew after a fork
    for name, number in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        stream = open(  # noqa: SIM115  # it lives as long as the process
            number,
            "w",
            buffering=1 if name == "stderr" or os.isatty(number) else -1,
            encoding=before.encoding,
            errors=before.errors,
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdin.encoding, closefd=False)  # type: ignore[misc]  # noqa: SIM115
