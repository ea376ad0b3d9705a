"""Runs the program `git`: never a shell, a hook, a pager, a prompt or the network."""

from __future__ import annotations

import os
import subprocess

from rooftrace.errors import RequestError


class RevisionError(RequestError):
    """A repository, a revision or a range of commits that cannot be used: says what to do."""


_OPTIONS = (
    f"core.hooksPath={os.devnull}",  # a checkout runs no code of the repository
    "core.fsmonitor=false",
    "core.quotePath=false",
    "submodule.recurse=false",
    "advice.detachedHead=false",
    "log.showSignature=false",
    "blame.blankBoundary=false",
)
_SETTINGS = {
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` leaves the index as it is
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "GIT_PAGER": "cat",
    "GIT_ALLOW_PROTOCOL": "file",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_LFS_SKIP_SMUDGE": "1",  # the content of large files would come over the network
    "GIT_LITERAL_PATHSPECS": "1",  # a file is named by its name, whatever is in it
    "LC_ALL": "C",
}
_KEPT = ("GIT_CONFIG", "GIT_EXEC_PATH", "GIT_CEILING_DIRECTORIES", "GIT_TRACE")


def git(folder: str | os.PathLike[str], *arguments: str) -> str:
    """What git prints when run in a folder.  Raises RevisionError with the reason it gives."""
    code, out, problem = _ran(folder, arguments)
    if code:
        raise RevisionError(f"git {arguments[0]}: {problem or f'ended with {code}'}")
    return out


def tried(folder: str | os.PathLike[str], *arguments: str) -> str | None:
    """What git prints when run in a folder; None where it fails."""
    code, out, _ = _ran(folder, arguments)
    return None if code else out


def _ran(folder: str | os.PathLike[str], arguments: tuple[str, ...]) -> tuple[int, str, str]:
    """Exit code, output, and the last line of the messages that says what is wrong."""
    options = [part for option in _OPTIONS for part in ("-c", option)]
    # Variables that git sets for its hooks would lead into another repository or index.
    kept = {n: v for n, v in os.environ.items() if not n.startswith("GIT_") or n.startswith(_KEPT)}
    try:
        done = subprocess.run(
            ["git", *options, *arguments],
            cwd=folder,
            env=kept | _SETTINGS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError as error:
        if error.filename == "git":
            raise RevisionError("there is no program git: install it, or compare folders") from None
        raise RevisionError(f"{os.fspath(folder)!r}: there is no such folder") from None
    problems = [line for line in done.stderr.splitlines() if line.startswith(("fatal:", "error:"))]
    lines = problems or done.stderr.splitlines()
    return done.returncode, done.stdout, lines[0].partition(": ")[2] or lines[0] if lines else ""
