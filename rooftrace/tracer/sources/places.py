"""Where a process that traces a target runs: its interpreter, its folder, its files."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rooftrace.tracer.asking import names
from rooftrace.tracer.sources.starting import Moves

_OURS = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class ProcessPlace:
    """The surroundings of a process; by default those of this one.

    Paths are real ones.  A checkout of the repository stands for it in every path.
    """

    python: str = sys.executable
    root: str = ""  # of the files that are watched, and that source lines are relative to
    repository: str = ""  # the root of the repository, where `root` is a checkout of it
    ignored: tuple[str, ...] = ()  # what git ignores there

    @cached_property
    def _moves(self) -> Moves | None:
        return Moves(self.repository, self.root, self.ignored) if self.repository else None

    @property
    def folder(self) -> str:
        """The working folder of the process; "" for that of this one.

        It is made in a checkout that has no such folder.
        """
        new = self._moves.new(os.getcwd()) if self._moves else None
        if new is None:
            return ""
        os.makedirs(new, exist_ok=True)
        return new

    def target(self, name: str) -> str:
        """The name of a target there: an absolute path leads into the checkout."""
        if self._moves is None:
            return name
        if names.is_script(name):
            return self._command(name)
        if not os.path.isabs(name):
            return name
        path, colon, attribute = name.rpartition(":")
        if not colon:
            path = name
        return f"{self._moves.new(path) or path}{colon}{attribute if colon else ''}"

    def _command(self, name: str) -> str:
        """A script's command there: absolute paths among its words lead into the checkout."""
        assert self._moves is not None
        before, words = names.ScriptCommand.parted(name)
        moved = [(os.path.isabs(word) and self._moves.new(word)) or word for word in words]
        return f"{before}{shlex.join(moved)}"

    def value(self, value: Any) -> Any:
        """The value of an assumption there: a file that it names stays the one of this folder."""
        policy, colon, path = value.partition(":") if isinstance(value, str) else (value, "", "")
        if policy != "histogram" or not self.folder:
            return value
        return f"{policy}{colon}{os.path.abspath(path)}"

    def here(self, message: str) -> str:
        """A message of the process with paths of the repository in place of the checkout's."""
        if not self.repository:
            return message
        return message.replace(self.root + os.sep, "").replace(self.root, self.repository)

    def environment(self) -> dict[str, str]:
        """Variables of the process.  It writes no bytecode beside the user's files."""
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        if not self._is_ours:
            env.pop("PYTHONHOME", None)
        if self._moves and env.get("PYTHONPATH"):
            entries = self._moves.path(env["PYTHONPATH"].split(os.pathsep))
            env["PYTHONPATH"] = os.pathsep.join(entries)
        return env

    def told(self) -> dict[str, Any]:
        """What `starting` and `worker` are told."""
        return {
            "path": sys.path if self._is_ours else _users_path(),
            "whole": self._is_ours,
            "root": self.root,
            "moves": [self.repository, self.root, self.ignored] if self.repository else None,
            "rooftrace": _OURS,
            "worker": f"{__package__}.worker",
        }

    @property
    def _is_ours(self) -> bool:
        return self.python == sys.executable


def _users_path() -> list[str]:
    """Entries of the import path that are neither Python's, an environment's, nor rooftrace's."""
    not_users = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    return [
        entry
        for entry in sys.path
        if not any(os.path.realpath(entry).startswith(os.path.realpath(p)) for p in not_users)
        and os.path.realpath(entry) != os.path.dirname(_OURS)
        and os.path.realpath(entry) != os.getcwd()
        and "site-packages" not in Path(entry).parts
    ]
