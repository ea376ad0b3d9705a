"""Git repositories, their commits and checkouts, as the program `git` gives them."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rooftrace._plain import Plain
from rooftrace._writing import aside
from rooftrace.errors import RequestError

# -- git -------------------------------------------------------------------------------------------
# Runs the program `git`: never a shell, a hook, a pager, a prompt, a filter or the network.
#
# In the user's repository git is only asked for names: what a revision is called there, and where
# its files lie.  `.git/config` can name programs for nearly everything else: filters, drivers of
# diffs, monitors, transports.  So everything else is asked of a git folder of our own, which has
# the repository's objects, names and index and nothing of its configuration.


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
    """The output of git in a folder.  Raises RevisionError with git's reason.

    own: variables that lead it to a git folder of our own.
    """
    code, out, problem = _ran(folder, arguments, own)
    if code:
        raise RevisionError(f"git {arguments[0]}: {problem or f'ended with {code}'}")
    return out


def tried(
    folder: str | os.PathLike[str], *arguments: str, own: Mapping[str, str] | None = None
) -> str | None:
    """The output of git in a folder; None if it fails."""
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


# -- repositories ----------------------------------------------------------------------------------
# A repository, its commits, and the state of its working tree, as git tells them.

GITLINK = "160000"
"""The mode of a submodule in a tree."""


@dataclass(frozen=True, slots=True)
class Commit(Plain):
    """One commit, as it is shown."""

    hash: str
    short: str
    subject: str
    author: str
    date: str  # of the author, ISO 8601

    def __str__(self) -> str:
        return f"{self.short} {self.subject!r}"

    @property
    def signed(self) -> str:
        """ "a1b2c3d 'Cast the norm' (Ada, 2025-01-31)"."""
        return f"{self} ({self.author}, {self.date[:10]})"


@dataclass(frozen=True, slots=True)
class State:
    """Changes of a working tree against its commit."""

    changed: int = 0  # tracked files, of which some may be submodules
    untracked: int = 0
    submodules: tuple[str, ...] = ()  # those with changes of their own, or at another commit

    @property
    def is_clean(self) -> bool:
        """Whether it is the commit, nothing else."""
        return not self.changed and not self.untracked

    def __str__(self) -> str:
        parts = [f"{self.changed} file{'s' * (self.changed != 1)} changed"] * bool(self.changed)
        parts += [f"{self.untracked} untracked"] * bool(self.untracked)
        parts += [f"submodule {path} differs" for path in self.submodules]
        return ", ".join(parts) or "nothing changed"


@dataclass(frozen=True)
class Repository:
    """A repository with a working tree; paths are real ones.

    `root` is asked for names alone; all else is asked of a git folder of our own.
    """

    root: str

    @cached_property
    def _own(self) -> Mapping[str, str]:
        """Variables that lead git to a folder of our own, which is gone when this object is."""
        folder = Path(tempfile.mkdtemp(prefix="rooftrace-git-"))
        weakref.finalize(self, _remove, folder, os.getpid())
        return make_git_folder(folder, self.root, self.commit_hash("HEAD"))

    def git(self, *arguments: str) -> str:
        """The output of git on the objects and files.  Raises RevisionError."""
        return git(self.root, *arguments, own=self._own)

    def tried(self, *arguments: str) -> str | None:
        """The output of git on the objects and files; None if it fails."""
        return tried(self.root, *arguments, own=self._own)

    def commit_hash(self, revision: str) -> str:
        """The hash of the commit of a revision.  Raises RevisionError, which names near ones."""
        if not revision or revision.startswith("-") or "\0" in revision:
            raise RevisionError(
                f"revision {revision!r}: expected a commit, a branch or a tag, for example main or "
                "HEAD~1"
            )
        where = f"{revision}^{{commit}}"
        hash_ = tried(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", where)
        if hash_ is None:
            raise RevisionError(self._unknown(revision))
        return hash_.strip()

    def commit(self, revision: str) -> Commit:
        """The commit of a revision.  Raises RevisionError, which names revisions that are near."""
        return self._commits(["-1", self.commit_hash(revision)])[0]

    def commits(self, before: str, after: str) -> list[Commit]:
        """The commits after one up to another, oldest first, by first parents."""
        return self._commits(["--first-parent", "--reverse", f"{before}..{after}"])

    def _commits(self, which: Sequence[str], files: Sequence[str] = ()) -> list[Commit]:
        form = "--format=%H%x00%h%x00%s%x00%an%x00%aI%x00"
        fields = self.git("log", form, "-z", *which, "--", *files).split("\0")
        # Five fields, and the empty one between two separators, for each commit.
        rows = (fields[i : i + 5] for i in range(0, len(fields) - 5, 6))
        return [Commit(*(part.strip("\n") for part in row)) for row in rows]

    def is_ancestor(self, before: str, after: str) -> bool:
        """Whether a commit is part of the history of another."""
        return self.tried("merge-base", "--is-ancestor", before, after) is not None

    def parents(self, hash_: str) -> list[str]:
        """Hashes of the parents of a commit; the first is what it was merged into."""
        return self.git("rev-parse", f"{hash_}^@").split()

    def merge_base(self, first: str, second: str) -> str:
        """The hash of the last common commit.  Raises RevisionError where there is none."""
        base = self.tried("merge-base", *map(self.commit_hash, (first, second)))
        if base is None:
            raise RevisionError(
                f"{first} and {second} have no commit in common{self._shallow()}; name the "
                "revision to compare with"
            )
        return base.split()[0]

    def base(self) -> tuple[Commit, str]:
        """The commit that the working tree is compared with by default, and why that one.

        It is where HEAD left the default branch.  On that branch it is HEAD, or the commit before
        where the working tree holds nothing else.
        """
        head = self.commit("HEAD") if tried(self.root, "rev-parse", "--verify", "HEAD") else None
        if head is None:
            raise RevisionError(f"{self.root}: the repository has no commit yet")
        default = self._default_branch()
        if default is not None:
            base = self.merge_base("HEAD", default)
            if base != head.hash:
                return self.commit(base), f"where HEAD left {default}"
        if not self.state().is_clean:
            return head, "HEAD"
        parents = self.parents(head.hash)
        if default is None or not parents:
            why = "there is no branch main or master" if default is None else "HEAD is the first"
            raise RevisionError(
                f"{self.root}: {why}, and nothing is uncommitted{self._shallow()}; name the "
                "revision to compare with"
            )
        return self.commit(parents[0]), "the commit before HEAD: nothing is uncommitted"

    def _default_branch(self) -> str | None:
        told = tried(self.root, "symbolic-ref", "--short", "--quiet", "refs/remotes/origin/HEAD")
        names = ("origin/main", "origin/master", "main", "master")
        for name in (told.strip() if told else "", *names):
            if name and tried(self.root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"):
                return name
        return None

    def state(self) -> State:
        """Changes of the working tree against HEAD."""
        entries = iter(self.git("status", "--porcelain=v2", "-z", _SUBMODULES).split("\0"))
        changed, untracked, moved = 0, 0, set()
        for entry in entries:
            kind = entry[:1]
            untracked += kind == "?"
            changed += kind in ("1", "2", "u") and bool(kind)
            if kind in ("1", "2") and entry.split(" ")[2].startswith("S"):
                moved.add(entry.split(" ", 8 if kind == "1" else 9)[-1])
            if kind == "2":
                next(entries, None)  # the name before it was renamed
        edited = {path for path, inner in self._submodules() if not inner.state().is_clean}
        return State(changed + len(edited - moved), untracked, tuple(sorted(moved | edited)))

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Files that git ignores, by their paths below the root; a folder ends with a slash."""
        listing = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
        return tuple(filter(None, self.git(*listing).split("\0")))

    def tree(self, hash_: str) -> Mapping[str, tuple[str, str]]:
        """(mode, object) of every file of a commit by its path; of a submodule its commit."""
        lines = filter(None, self.git("ls-tree", "-r", "-z", hash_).split("\0"))
        files = {}
        for line in lines:
            head, _, path = line.partition("\t")
            mode, _, content = head.split(" ")
            files[path] = (mode, content)
        return files

    def tracked(self) -> frozenset[str]:
        """Paths of the files of the working tree that git knows, those of submodules too."""
        inner = (f"{path}/{file}" for path, each in self._submodules() for file in each.tracked())
        return frozenset([*self.git("ls-files", "-z").split("\0"), *inner])

    def _submodules(self) -> Iterator[tuple[str, Repository]]:
        """Submodules of the working tree by their paths."""
        for line in self.git("ls-files", "-z", "--stage").split("\0"):
            head, _, path = line.partition("\t")
            inner = self.submodule(path) if head.startswith(GITLINK) else None
            if inner is not None:
                yield path, inner

    def submodule(self, path: str) -> Repository | None:
        """The submodule at a path; None where this clone does not have it."""
        root = os.path.join(self.root, path)
        inner = repository_at(root) if os.path.lexists(os.path.join(root, ".git")) else None
        return inner if inner is not None and inner.root == root else None

    def touching(self, before: str, after: str, files: Sequence[str]) -> list[Commit]:
        """The commits after one up to another that change some of these files, last one first."""
        return self._commits([f"{before}..{after}"], files) if files else []

    def uncommitted(self, files: Sequence[str]) -> list[str]:
        """Those of these files whose content in the working tree is in no commit of HEAD."""
        if not files:
            return []
        options = ("--name-only", "--no-ext-diff", _SUBMODULES, "-z")
        listing = self.git("diff", *options, "HEAD", "--", *files)
        return list(filter(None, listing.split("\0")))

    def last_change(self, path: str) -> Commit | None:
        """The last commit of HEAD that changed a file; None where there is none."""
        commits = self._commits(["-1", "HEAD"], [path])
        return commits[0] if commits else None

    def added(self, path: str) -> Commit | None:
        """The commit that added a file, of all branches; None where there is none."""
        commits = self._commits(["--all", "--diff-filter=A", "-1"], [path])
        return commits[0] if commits else None

    def _unknown(self, revision: str) -> str:
        refs = ("refs/heads", "refs/remotes", "refs/tags")
        names = git(self.root, "for-each-ref", "--format=%(refname:short)", *refs).split("\n")
        close = difflib.get_close_matches(revision, filter(None, names), n=3, cutoff=0.5)
        listed = f"; did you mean {', '.join(close)}?" if close else ""
        return f"revision {revision!r}: {self.root} has no such commit{listed}{self._shallow()}"

    def _shallow(self) -> str:
        shallow = (tried(self.root, "rev-parse", "--is-shallow-repository") or "").strip() == "true"
        return " (this clone is shallow: `git fetch --unshallow` brings the rest)" * shallow


_SUBMODULES = "--ignore-submodules=dirty"
"""git would start a process in each submodule, with the configuration that lies there."""


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def repository_at(folder: str) -> Repository:
    """The repository whose working tree a folder is in.  Raises RevisionError."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        bare = git(folder, "rev-parse", "--is-bare-repository")
    except RevisionError as error:
        reason = str(error)
        if "not a git repository" in reason:
            raise RevisionError(f"{folder}: it is in no git repository") from None
        if "safe.bareRepository" not in reason:
            raise RevisionError(f"{folder}: {reason}") from None
        bare = "true"
    if bare.strip() == "true":
        raise RevisionError(f"{folder}: the repository is bare; make a clone of it, and run there")
    root = os.path.realpath((tried(folder, "rev-parse", "--show-toplevel") or "").rstrip("\n"))
    if not Path(os.path.realpath(folder)).is_relative_to(root):
        raise RevisionError(
            f"{folder}: its repository has its files in {root} (core.worktree), so this folder is "
            "no part of it"
        )
    return Repository(root)


# -- checkouts -------------------------------------------------------------------------------------
# A revision as files in a temporary folder, which is gone afterwards.
#
# Nothing of the user's repository is written: the checkout has a git folder of its own.  No filter
# runs, so a file that a filter would change (Git LFS, git-crypt) is there as it is stored.


@dataclass(frozen=True, slots=True)
class Checkout:
    """A commit as files."""

    root: str  # where its files are
    missing: tuple[str, ...] = ()  # submodules whose files are not in this clone


@contextmanager
def checked_out(repository: Repository, hash_: str) -> Iterator[Checkout]:
    """The files of a commit, in a folder of the repository's name."""
    with aside(Path(tempfile.gettempdir()).resolve()) as folder:
        place = folder / "rooftrace-checkout" / os.path.basename(repository.root)
        yield Checkout(str(place), tuple(_check_out(repository, hash_, place, "")))


def link_ignored(repository: Repository, root: str) -> None:
    """Lead a checkout to what git ignores in the repository: data that a script reads.

    What lies there already stays.
    """
    for path in repository.ignored:
        there, here = (os.path.join(place, path.rstrip("/")) for place in (repository.root, root))
        if not os.path.lexists(here):
            os.makedirs(os.path.dirname(here), exist_ok=True)
            os.symlink(there, here, target_is_directory=path.endswith("/"))


def _check_out(repository: Repository, hash_: str, place: Path, below: str) -> list[str]:
    """Check a commit out, and its submodules where their commits are in this clone.

    Returns the paths of submodules that are missing.
    """
    own = make_git_folder(place / ".git", repository.root, hash_)
    own |= {"GIT_WORK_TREE": str(place), "GIT_INDEX_FILE": str(place / ".git" / "index")}
    git(place, "read-tree", "-m", "-u", hash_, own=own)
    missing = []
    for path, (mode, content) in repository.tree(hash_).items():
        if mode != GITLINK:
            continue
        inner, shown = repository.submodule(path), f"{below}{path}"
        if inner is not None and inner.tried("cat-file", "-e", f"{content}^{{commit}}") is not None:
            missing += _check_out(inner, content, place / path, f"{shown}/")
        else:
            missing.append(shown)
    return missing
