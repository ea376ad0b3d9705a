"""Which commit of a range wrote a line, or took one away."""

from __future__ import annotations

import os

from rooftrace.tracer.revisions.repositories import Commit, Repository

UNCOMMITTED = "not committed yet"


def wrote(
    repository: Repository, before: str, after: str | None, source: str
) -> Commit | str | None:
    """The commit after `before` that wrote the line "file.py:12" of `after` (None: the files).

    UNCOMMITTED for a line of the working tree that is in no commit; None for one that is older.
    """
    file, number = _place(source)
    if number is None:
        return None
    span = [f"^{before}"] if after is None else [f"{before}..{after}"]
    told = repository.tried("blame", "--porcelain", "-L", f"{number},{number}", *span, "--", file)
    if not told or "\nboundary\n" in told:
        return None
    hash_ = told.split(" ", 1)[0]
    return repository.commit(hash_) if hash_.strip("0") else UNCOMMITTED


def removed(
    repository: Repository, before: str, after: str | None, source: str
) -> Commit | str | None:
    """The commit up to `after` (None: the working tree) that took away a line of `before`.

    None for a line that is still there, or whose end git cannot tell.
    """
    file, number = _place(source)
    if number is None:
        return None
    line = f"{number},{number}"
    span = f"{before}..{after or 'HEAD'}"
    told = repository.tried("blame", "--reverse", "--porcelain", "-L", line, span, "--", file)
    if told:
        for text in told.splitlines():
            if text.startswith("previous "):  # in reverse: the first commit without the line
                return repository.commit(text.split(" ")[1])
        number, file = int(told.split(" ")[1]), _name_in(told, file)
    if after is None and _removed_here(repository, file, number):
        return UNCOMMITTED
    return None


def _removed_here(repository: Repository, file: str, number: int) -> bool:
    """Whether the working tree no longer has a line of HEAD."""
    told = repository.tried("diff", "-U0", "--no-ext-diff", "HEAD", "--", file) or ""
    for text in told.splitlines():
        if text.startswith("@@ -"):
            start, _, count = text.split(" ")[1][1:].partition(",")
            if int(start) <= number < int(start) + int(count or 1):
                return True
    return False


def _name_in(told: str, file: str) -> str:
    names = [t.partition(" ")[2] for t in told.splitlines() if t.startswith("filename ")]
    return names[0] if names else file


def _place(source: str) -> tuple[str, int | None]:
    """The file and the number of a line; no number for what is no line of a repository."""
    file, _, number = source.rpartition(":")
    if not file or not number.isdigit() or os.path.isabs(file):
        return file, None
    return file, int(number)
