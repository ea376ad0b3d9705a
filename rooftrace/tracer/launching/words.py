"""From the words of a command line to the program that runs, and what its launcher asks for."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rooftrace.errors import RequestError, hint
from rooftrace.tracer.launching import accelerated, launchers
from rooftrace.tracer.launching.notebooks import check_runner
from rooftrace.tracer.launching.records import CommandLine

_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_FLAGS = frozenset("bBdEiIOPqsSuvx")
"""Options of Python without a value, which change nothing here."""
_RUNNERS = frozenset({"uv", "poetry", "pipenv", "pdm", "hatch", "rye"})
"""Programs whose `run` starts the words after it in an environment."""
_SCHEDULERS = frozenset({"srun", "mpirun", "mpiexec", "jsrun", "horovodrun", "torchx", "ray"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

_BY_NAME: dict[str, Callable[[Sequence[str]], CommandLine]] = {
    "torchrun": launchers.torchrun,
    "deepspeed": launchers.deepspeed,
    "deepspeed.launcher.runner": launchers.deepspeed,
    "torch.distributed.run": launchers.torchrun,
    "torch.distributed.launch": launchers.torch_launch,
    "accelerate-launch": accelerated.accelerate,
    "accelerate.commands.launch": accelerated.accelerate,
}
_WITH_COMMAND = {
    ("accelerate", "launch"): accelerated.accelerate,
    ("accelerate.commands.accelerate_cli", "launch"): accelerated.accelerate,
    ("lightning", "run"): launchers.lightning,
    ("fabric", "run"): launchers.lightning,
}


def understood(words: Sequence[str], folder: str | os.PathLike[str] | None = None) -> CommandLine:
    """The program of a command line: `["torchrun", "--nproc_per_node=8", "train.py", "a.yaml"]`.

    folder: the working directory; None for that of this process.  Understood are a script, `python`
    with a script or `-m`, torchrun and torch.distributed.launch, accelerate launch, deepspeed,
    lightning and fabric run, programs of Python on PATH, and assignments of variables in front.
    Raises RequestError, which quotes the word, for a program that is not there and for an option
    that its launcher does not know.
    """
    words = [os.fspath(word) for word in words]
    here = os.path.abspath(folder or os.getcwd())
    environment: dict[str, str] = {}
    words = _start(words, environment)
    if not words:
        raise RequestError("a command line without a program: expected train.py and its arguments")
    launch = _understood(words)
    environment = {**environment, **launch.environment}
    program = launch.program if launch.module else _script(launch.program, here)
    if launch.module and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", launch.program):
        raise RequestError(f"-m {launch.program}: expected the dotted name of a module, as in a.b")
    written = launch.program
    return replace(launch, program=program, written=written, environment=environment, folder=here)


def _start(words: list[str], environment: dict[str, str]) -> list[str]:
    """The words after assignments, `env`, `--` and `uv run`; assignments go to `environment`."""
    while words:
        if _ASSIGNMENT.match(words[0]):
            name, _, value = words[0].partition("=")
            environment[name] = value
            words = words[1:]
        elif words[0] in ("env", "--", "exec", "nohup", "time"):
            words = words[1:]
        elif Path(words[0]).name in _RUNNERS and words[1:2] == ["run"]:
            words = words[2:]
        else:
            break
    return words


def _understood(words: Sequence[str]) -> CommandLine:
    first, name = words[0], Path(words[0]).name
    if _PYTHON.fullmatch(name):
        return _python(words)
    if first == "-m":
        return _module(words[1:])
    check_runner(name, [*words])
    if name in _SCHEDULERS:
        raise RequestError(
            f"{first}: a launcher that is not understood; write the program after it, and how many "
            "processes it starts as --ranks"
        )
    known = name == first or not Path(first).suffix  # a script of the user may have such a name
    if known and (name, *words[1:2]) in _WITH_COMMAND:
        return _WITH_COMMAND[name, words[1]](words[2:])
    if known and name in _BY_NAME:
        return _BY_NAME[name](words[1:])
    if first.startswith("-"):
        raise RequestError(
            f"{first}: expected a program before its options, as in train.py {first}"
        )
    return CommandLine(program=first, arguments=tuple(words[1:]))


def _python(words: Sequence[str]) -> CommandLine:
    """What `python ...` runs."""
    place = 1
    while place < len(words):
        word = words[place]
        if word == "-m" or (word.startswith("-m") and not word.startswith("--")):
            return _module(words[place + 1 :] if word == "-m" else [word[2:], *words[place + 1 :]])
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            place += 2
        elif word.startswith(("-W", "-X")) or (
            word[:1] == "-" and set(word[1:]) <= _FLAGS != set()
        ):
            if word == "-":
                break
            place += 1
        elif word.startswith("-"):
            raise RequestError(
                f"{words[0]} {word}: expected a script or -m with a module; write code of -c "
                "into a file"
                if word.startswith("-c")
                else f"{words[0]} {word}: not an option of Python that is understood here"
            )
        else:
            return _understood_script(words[place:])
    raise RequestError(f"{' '.join(words)}: expected a script, or -m with a module, after Python")


def _understood_script(words: Sequence[str]) -> CommandLine:
    """A script after `python`, which may be a launcher's own: `python /usr/bin/torchrun`."""
    if not Path(words[0]).suffix and Path(words[0]).name in (*_BY_NAME, "accelerate"):
        return _understood([Path(words[0]).name, *words[1:]])
    return CommandLine(program=words[0], arguments=tuple(words[1:]))


def _module(words: Sequence[str]) -> CommandLine:
    if not words:
        raise RequestError("-m: expected the name of a module after it")
    check_runner(words[0], [*words])
    if (words[0], *words[1:2]) in _WITH_COMMAND:
        return _WITH_COMMAND[words[0], words[1]](words[2:])
    if words[0] in _BY_NAME:
        return _BY_NAME[words[0]](words[1:])
    return CommandLine(program=words[0], module=True, arguments=tuple(words[1:]))


def _script(word: str, folder: str) -> str:
    """The path of a script, absolute; raises RequestError where there is none."""
    path = Path(folder, os.path.expanduser(word))
    if path.is_file() or (path / "__main__.py").is_file():
        return str(path)
    there = shutil.which(word) if os.sep not in word else None
    if there and _is_python(there):
        return there
    if there:
        raise RequestError(f"{word}: {there} is no program of Python, so it cannot be run here")
    if path.is_dir():
        raise RequestError(f"{word}: a folder without __main__.py; name a script in it")
    near = path.parent if path.parent.is_dir() else Path(folder)
    others = sorted(other.name for other in near.glob("*.py"))[:200]
    raise RequestError(
        f"{word}: no such script (looked in {path.parent}){hint(path.name, others)}; name a "
        "script, -m with a module, or a launcher such as torchrun and its script"
    )


def _is_python(path: str) -> bool:
    """Whether a file is text that begins by calling Python."""
    with open(path, "rb") as file:
        start = file.readline(200)
        return start.startswith(b"#!") and (
            b"python" in start or (b"/sh" in start and b"python" in file.readline(200))
        )
