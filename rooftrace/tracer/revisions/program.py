"""Runs the program `git`: never a shell, a hook, a pager, a prompt, a filter or the network.

In the user's repository git is only asked for names: what a revision is called there, and where its
files lie.  `.git/config` can name programs for nearly everything else: filters, drivers of diffs,
monitors, transports.  So everything else is asked of a git folder of our own, which has the
repository's objects, names and index and nothing of its configuration.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rooftrace.errors import RequestError


class RevisionError(RequestError):
    """A repository, a revision or a range of commits that cannot be used: says what to do."""


_OPTIONS = (
    f"core.hooksPath={os.devnull}",
    "core.fsmonitor=false",
    "core.quotePath=false",
    "safe.bareRepository=explicit",  # a bare one may lie in a clone as plain files
    "submodule.recurse=false",
    "log.showSignature=false",
    "blame.blankBoundary=false",
)
_SETTINGS = {
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` leaves the index as it is
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "GIT_PAGER": "cat",
    "GIT_ALLOW_PROTOCOL": "",  # what a partial clone lacks is not fetched, by any program
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",  # a hash stands for its own content
    "GIT_LFS_SKIP_SMUDGE": "1",  # the content of large files would come over the network
    "GIT_LITERAL_PATHSPECS": "1",  # a file is named by its name, whatever is in it
    "LC_ALL": "C",
}
_KEPT = ("GIT_CONFIG", "GIT_EXEC_PATH", "GIT_CEILING_DIRECTORIES", "GIT_TRACE")


def git(
    folder: str | os.PathLike[str], *arguments: str, own: Mapping[str, str] | None = None
) -> str:
    """What git prints when run in a folder.  Raises RevisionError with the reason it gives.

    own: variables that lead it to a git folder of our own.
    """
    code, out, problem = _ran(folder, arguments, own)
    if code:
        raise RevisionError(f"git {arguments[0]}: {problem or f'ended with {code}'}")
    return out


def tried(
    folder: str | os.PathLike[str], *arguments: str, own: Mapping[str, str] | None = None
) -> str | None:
    """What git prints when run in a folder; None where it fails."""
    code, out, _ = _ran(folder, arguments, own)
    return None if code else out


def _ran(
    folder: str | os.PathLike[str], arguments: tuple[str, ...], own: Mapping[str, str] | None
) -> tuple[int, str, str]:
    """Exit code, output, and the last line of the messages that says what is wrong."""
    options = [part for option in _OPTIONS for part in ("-c", option)]
    # Variables that git sets for its hooks would lead into another repository or index.
    kept = {n: v for n, v in os.environ.items() if not n.startswith("GIT_") or n.startswith(_KEPT)}
    try:
        done = subprocess.run(
            ["git", *options, *arguments],
            cwd=folder,
            env={**kept, **_SETTINGS, **(own or {})},
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


# -- a git folder of our own -----------------------------------------------------------------------

_LIKE = ("autocrlf", "eol", "filemode", "ignorecase", "precomposeunicode", "symlinks")
"""Settings of [core] by which git compares and writes files; each is a word."""
_PLACES = ("objects", "shallow", "info/exclude", "index")


def make_git_folder(folder: Path, root: str, hash_: str) -> dict[str, str]:
    """Make a git folder that is at a commit of the repository whose working tree is at `root`.

    It borrows the objects; branches and tags are copied.  Returns the variables by which git asks
    it about the working tree of the repository.
    """
    where = [part for place in _PLACES for part in ("--git-path", place)]
    asked = ("rev-parse", "--show-object-format", "--path-format=relative")
    told = git(root, *asked, *where).splitlines()
    if len(told) != 1 + len(_PLACES):
        raise RevisionError(f"{root!r}: its repository has an end of line in its path; rename it")
    objects, shallow, exclude, index = (Path(root, path) for path in told[1:])
    for name in ("refs", "objects/info", "info"):
        (folder / name).mkdir(parents=True)
    (folder / "HEAD").write_text(f"{hash_}\n")
    (folder / "config").write_text(_config(root, told[0]))
    lent = os.fsencode(objects).replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    (folder / "objects" / "info" / "alternates").write_bytes(b'"' + lent + b'"\n')
    refs = git(root, "for-each-ref", "--format=%(objectname) %(refname)")
    (folder / "packed-refs").write_text(refs, encoding="utf-8", errors="surrogateescape")
    for file, name in ((shallow, "shallow"), (exclude, "info/exclude")):
        if file.is_file():
            (folder / name).write_bytes(file.read_bytes())
    for part in index.parent.glob("sharedindex.*"):  # what a split index rests on
        (folder / part.name).symlink_to(part)
    return {"GIT_DIR": str(folder), "GIT_WORK_TREE": root, "GIT_INDEX_FILE": str(index)}


def _config(root: str, objects: str) -> str:
    lines = ["[core]", "repositoryformatversion = 1", "bare = false"]
    for name in _LIKE:
        value = (tried(root, "config", "--get", f"core.{name}") or "").strip()
        lines += [f"{name} = {value}"] * value.isalnum()
    return "\n".join([*lines, "[extensions]", f"objectFormat = {objects}", ""])
