"""Targets that are scripts: a command line, and how it is to be run; no torch."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Any

from rooftrace.errors import RequestError, hint

RUN = "run:"
"""What stands before a command that is a target."""
_SCRIPTS = (".py", ".ipynb")
STEPS = 3
"""How many training steps a script runs, if nobody says."""
_NUMBERS = ("steps", "ranks", "rank")
_OPTIONS = ("chip", "system", "boundary", *_NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """A target that is a script.

    words: its command line.  chip, system: what it sees, by name or path; None: the usual chip.
    steps: after so many training steps it is ended; None: nobody says.  ranks: of how many
    processes it is the one with number `rank`, where no launcher says.  boundary: what begins a
    turn.
    """

    words: tuple[str, ...]
    chip: str | None = None
    system: str | None = None
    steps: int | None = None
    ranks: int | None = None
    rank: int = 0
    boundary: str = "auto"

    @staticmethod
    def of(target: str) -> ScriptCommand:
        """The script that a target is: "train.py --flag", or "run:--ranks 8 train.py".

        Raises RequestError for options of ours that are not there.
        """
        words = _words(target)
        asked: dict[str, Any] = {}
        while target.startswith(RUN) and words and words[0].startswith("--"):
            option, *words = words
            if option == "--":
                break
            name, equals, value = option[2:].partition("=")
            if not equals and words:
                value, *words = words
            asked[name] = _value(target, name, value)
        if not words:
            raise RequestError(f"target {target!r}: expected a script, as in run:train.py")
        return ScriptCommand(words=tuple(words), **asked)

    @staticmethod
    def parted(target: str) -> tuple[str, list[str]]:
        """A target's "run:" where it has one, and its words, options of ours among them."""
        return RUN if target.startswith(RUN) else "", _words(target)

    @property
    def where(self) -> str:
        """The file of the script, or the dotted name of its module."""
        after = dict(zip(self.words, self.words[1:], strict=False)).get("-m", "")
        return next((word for word in self.words if word.endswith(_SCRIPTS)), after)


def is_script(target: str) -> bool:
    """Whether a target is a script: run:COMMAND, or one that begins with a Python file or a
    notebook."""
    if target.startswith(RUN):
        return True
    if not any(end in target for end in _SCRIPTS) or target.startswith("hf:"):
        return False
    words = _words(target)
    return bool(words) and words[0].endswith(_SCRIPTS)


def _words(target: str) -> list[str]:
    """The words of a command.  Raises RequestError for a quotation that does not end."""
    text = target.removeprefix(RUN)
    if os.path.isfile(text):  # a path with spaces
        return [text]
    try:
        return shlex.split(text)
    except ValueError as error:
        if target.startswith(RUN):
            raise RequestError(f"target {target!r}: {error}") from None
        return []


def _value(target: str, name: str, value: str) -> Any:
    if name not in _OPTIONS:
        raise RequestError(
            f"target {target!r}: --{name} stands before the script, and is none of "
            f"{', '.join(f'--{option}' for option in _OPTIONS)}{hint(name, _OPTIONS)}"
        )
    least = 0 if name == "rank" else 1
    if name in _NUMBERS:
        if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) >= least):
            raise RequestError(
                f"target {target!r}: --{name} {value}: expected a whole number of at least {least}"
            )
        return int(value)
    if not value:
        raise RequestError(f"target {target!r}: --{name}: expected a name or a TOML path")
    return value
