"""Two revisions of a repository: each side runs its own files, and a bisection finds the commit.

The package of the repository is installed as editable installs are: a finder that `sitecustomize`
sets up leads every process to the files of the working tree.  A side that follows it runs the same
code as the other side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

import rooftrace as rt
from rooftrace.diffs.git import RevisionError, repositories
from rooftrace.diffs.git.repositories import repository_at
from rooftrace.errors import RequestError, TargetError
from rooftrace.reporting.commands import revisions
from rooftrace.tracer import Job
from rooftrace.tracer.phases.apart import Outcome, ProcessPlace, run_apart
from tests.reporting.conftest import Run
from tests.reporting.gate_support import CASTS, MODELS, SETTINGS, repository
from tests.repositories import git

pytestmark = pytest.mark.subprocess

MODEL = """
import torch
from torch import nn
from pkg._built import BUILT
from pkg.norm import Norm
from pkg.sizes import WIDTH


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc(self.norm(x))


def build():
    return Net().bfloat16(), (torch.ones(64, WIDTH, dtype=torch.bfloat16),)
"""
NORM = """
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        y = x
        return (y * y.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)
"""
HOOK = """
import importlib.util, os, sys

class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "pkg":
            return None
        folder = os.environ["EDITABLE"]
        return importlib.util.spec_from_file_location(
            name, folder + "/__init__.py", submodule_search_locations=[folder])

sys.meta_path.insert(0, Editable)
"""


class Repo(NamedTuple):
    """A repository, and the hashes of its commits by their subjects."""

    root: Path
    hashes: dict[str, str]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """Commits with a broken one, and a norm in fp32 that comes with a merge.

    The path has a space and a letter beyond ASCII.  A post-checkout hook would leave a file.
    """
    root = tmp_path_factory.mktemp("the models é") / "repo"
    package = root / "src" / "pkg"
    package.mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    hashes = {}

    def commit(subject: str, **files: str) -> None:
        for name, text in files.items():
            (package / f"{name}.py").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-q", "--allow-empty", "-m", subject)
        hashes[subject] = git(root, "rev-parse", "HEAD")

    (root / ".gitignore").write_text("_built.py\n")
    (package / "_built.py").write_text("BUILT = True\n")
    hook = root / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch '{root.parent}/hook-ran'\n")
    hook.chmod(0o755)
    commit("The model", __init__="", model=MODEL, norm=NORM, sizes="WIDTH = 256\n", unused="")
    for number in range(4):
        commit(f"Nothing that runs {number}", unused=f"A = {number}\n")
    commit("Break the norm", norm=NORM.replace("y = x", "y = z"))
    commit("Mend the norm", norm=NORM)
    git(root, "branch", "side")
    commit("Nothing on main", unused="B = 1\n")
    git(root, "checkout", "-q", "side")
    commit("Norm in fp32", norm=NORM.replace("y = x", "y = x.float()"))
    commit("Nothing on side", model=MODEL + "# the end\n")
    git(root, "checkout", "-q", "main")
    git(root, "merge", "-q", "--no-ff", "-m", "Merge side", "side")
    hashes["Merge side"] = git(root, "rev-parse", "HEAD")
    commit("The last one", unused="C = 1\n")
    (root.parent / "hook-ran").unlink(missing_ok=True)
    return Repo(root, hashes)


KEPT: dict[str, tuple[str, Outcome]] = {}
"""What came of each process, with the root of its files, by all that it was given."""


def run_once(jobs: Sequence[Job], places: Sequence[ProcessPlace]) -> list[Outcome]:
    """Start a process only for what none was given: a checkout of a commit is the same each time,
    but for its folder."""
    keys = [
        repr((job, replace(place, root=""), files_of(Path(place.root or "."))))
        for job, place in zip(jobs, places, strict=True)
    ]
    new = [n for n, key in enumerate(keys) if key not in KEPT and key not in keys[:n]]
    for n, made in zip(
        new, run_apart([jobs[n] for n in new], [places[n] for n in new]), strict=True
    ):
        KEPT[keys[n]] = places[n].root, made
    return [moved(*KEPT[key], place.root) for key, place in zip(keys, places, strict=True)]


def moved(root: str, outcome: Outcome, to: str) -> Outcome:
    """An outcome as if its files had been in another folder."""
    modules = {name: file.replace(root, to) for name, file in outcome.reads.modules.items()}
    return replace(outcome, reads=replace(outcome.reads, modules=modules))


@pytest.fixture
def here(repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """The repository as working folder, its package installed to be edited there."""
    monkeypatch.setattr(revisions, "run_apart", run_once)
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("EDITABLE", str(repo.root / "src" / "pkg"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of-a-hook"))  # as when a hook runs us
    monkeypatch.chdir(repo.root)
    return repo


def files_of(root: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(root): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def whole(root: Path) -> tuple[object, ...]:
    """Everything of a repository that a diff has to leave alone."""
    refs = git(root, "for-each-ref"), git(root, "worktree", "list"), git(root, "reflog", "--all")
    return (
        files_of(root),
        (root / ".git" / "index").read_bytes(),
        refs,
        (root / ".git/HEAD").read_text(),
    )


def width(diff: rt.types.Diff) -> tuple[float, float]:
    """The width of the model on both sides, by its parameters: width * width + width."""
    params = diff.phases[0].totals["params"]
    return tuple(((4 * n + 1) ** 0.5 - 1) / 2 for n in (params.before, params.after))  # type: ignore[return-value]


@pytest.mark.slow
def test_each_side_runs_its_own_files_and_nothing_of_the_user_is_touched(
    here: Repo, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here.root)
    package = here.root / "src" / "pkg"
    (package / "sizes.py").write_text("from pkg.more import MORE\nWIDTH = 256 + MORE\n")
    (package / "more.py").write_text("MORE = 256\n")
    before = whole(here.root)
    try:
        change = rt.diff("pkg.model:build", git=here.hashes["Mend the norm"], phases=["forward"])
        ran = run("diff", "src/pkg/model.py:build", "--git", "main", "nope")
        again, hook_ran = whole(here.root), (here.root.parent / "hook-ran").exists()
    finally:
        git(here.root, "checkout", "-q", "--", ".")
        (package / "more.py").unlink()
    assert again == before and not hook_ran
    assert width(change) == (256, 512)  # by the code of the working tree both would have 512

    first, second = change.origins.before, change.origins.after
    assert (first.commit.subject, first.working_tree) == ("Mend the norm", None)
    assert (second.commit.subject, second.working_tree) == (
        "The last one",
        "1 file changed, 1 untracked",
    )
    assert change.names == (first.commit.short, "working tree")
    assert first.notes == ("in no commit, so read from the working tree: src/pkg/_built.py",)
    assert second.notes == ("untracked: src/pkg/more.py",)
    assert first.versions == second.versions and {"torch", "Python"} <= first.versions.keys()
    # Commits that touch the files that ran: neither those of unused.py, nor the merge.
    assert [commit.subject for commit in change.origins.touching] == [
        "Nothing on side",
        "Norm in fp32",
    ]
    assert change.origins.uncommitted == ["src/pkg/sizes.py"]
    assert "untracked: src/pkg/more.py" in str(change)
    data = change.to_dict()["origins"]
    assert data["before"]["commit"]["hash"] == here.hashes["Mend the norm"]
    assert ran.code == 2 and "revision 'nope'" in ran.err
    a_check_names_the_line_and_the_commit_since_the_lock(tmp_path, run, monkeypatch)


def a_check_names_the_line_and_the_commit_since_the_lock(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the test above: the former code of an exceeded budget comes from git."""
    root = tmp_path / "gated"
    root.mkdir()
    repository(root, SETTINGS.replace('cnn = "models.py:cnn"\n', ""))
    monkeypatch.chdir(root)
    git(root, "init", "-q", "-b", "main")
    here = "rooftrace.reporting.gates.making.trace_each_apart"  # only former code needs a process
    monkeypatch.setattr(here, lambda jobs, at_once: [None] * len(jobs))
    assert run("lock").code == 0
    assert run("check").code == 0
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "Lock the costs")
    text = MODELS.replace("self.up(self.norm(x))", CASTS)
    (root / "models.py").write_text(text)
    git(root, "commit", "-q", "-a", "-m", "Cast in every block")
    ran = run("check", "--format", "json")
    assert ran.code == 1
    causes = [cause for shift in json.loads(ran.out)["over"] for cause in shift["causes"]]
    line = 1 + text.splitlines().index(next(t for t in text.splitlines() if CASTS in t))
    assert "cast fp32 -> fp64 by double() x3" in causes[0]
    assert f"models.py:{line}: written by" in causes[0] and "'Cast in every block'" in causes[0]
    # A second commit changes no line that runs: the line that makes its module is named.
    text = text.replace("nn.Linear(width, 10)", "nn.Linear(width, 3000)")
    (root / "models.py").write_text(text)
    git(root, "commit", "-q", "-a", "-m", "Widen the head")
    ran = run("check", "--format", "github")
    head = ran.out.partition("<details>")[0]
    wide = 1 + next(n for n, t in enumerate(text.splitlines()) if "self.head = " in t)
    (cause,) = [t for t in head.splitlines() if "head.weight fp32[10, 64] -> [3000, 64]" in t]
    assert f"models.py:{wide}: written by" in cause and "'Widen the head'" in cause
    assert "`flops`" in cause and cause.endswith("in forward)")
    casts = [t for t in head.splitlines() if "cast fp32 -> fp64" in t]
    assert len(casts) == 1 and "`flops`" not in casts[0] and len(head.splitlines()) <= 40
    told = [t for t in ran.out.splitlines() if t.startswith("**Cause")]
    assert len(told) == len({*told}) and "What else moved" in ran.out
    assert git(root, "worktree", "list").count("\n") == 0


@pytest.mark.slow
def test_a_bisection_and_what_cannot_be_compared(
    here: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts in one test, since both start processes."""
    a_bisection_finds_the_commit_behind_a_merge_and_traces_few(here)
    what_cannot_be_compared_is_said_plainly(here, tmp_path, monkeypatch)


def a_bisection_finds_the_commit_behind_a_merge_and_traces_few(here: Repo) -> None:
    start = here.hashes["The model"]
    change = rt.diff(
        "pkg.model:build",
        git=(start, "main"),
        bisect="bytes>5%",
        execution="eager",
        phases=["forward"],
    )
    told = change.origins.bisection
    assert (told.first.subject, told.last_without.subject) == ("Norm in fp32", "Mend the norm")
    assert told.first.author == "Ada" and told.against.hash == start
    assert [merge.subject for merge in told.merges] == ["Merge side"]
    assert told.commits == 9 + 2  # first parents of main after the start, and those of the side
    # The broken commit is skipped; most others have the files of one that was traced.
    assert [commit.subject for commit, _ in told.skipped] in ([], ["Break the norm"])
    assert told.traced <= 4 < 4 + told.reused + len(told.skipped)
    assert ("src/pkg/norm.py:7", "Norm in fp32") in [
        (line.source, line.commit.subject) for line in change.origins.lines
    ]
    bytes_ = change.phases[0].totals["bytes"]
    assert bytes_.relative > 0.05 and change.phases[0].totals["params"].delta == 0
    later = f"begin the range at a commit after {told.first.short} without it"
    assert "first holds at" in str(change) and later in " ".join(str(change).split())
    assert git(here.root, "worktree", "list").count("\n") == 0
    with pytest.raises(RevisionError, match=r"'time>500%' does not hold from .* nothing to find"):
        rt.diff("pkg.model:build", git=(start, start), bisect="time>500%", phases=["forward"])
    with pytest.raises(RequestError, match=r"^--bisect 'tme>5%': .* did you mean 'time'"):
        rt.diff("pkg.model:build", git=(start, start), bisect="tme>5%")


def what_cannot_be_compared_is_said_plainly(
    here: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, good = here.hashes["Break the norm"], here.hashes["The model"]
    with pytest.raises(TargetError) as caught:
        rt.diff("pkg.model:build", git=(broken, good), phases=["forward"])
    message = str(caught.value)
    assert message.startswith(f"before, {broken[:7]} 'Break the norm': pkg.model:build: ")
    assert "src/pkg/norm.py:7 in forward: y = z" in message
    assert f"after, {good[:7]} 'The model': it builds (forward " in message
    assert str(tmp_path) not in message and "rooftrace-checkout" not in message
    # An interpreter without rooftrace's libraries, and a program that is no interpreter.
    bare = Path(sys.base_prefix, "bin", "python3")
    for python, expected in ((bare, "cannot run rooftrace: "), ("/bin/true", "ended with 0")):
        if Path(python).is_file() and Path(python) != Path(sys.executable):
            with pytest.raises(TargetError, match=f"before.*{expected}"):
                rt.diff("src/pkg/model.py:build", before={"python": python}, phases=["forward"])

    for revision, expected in {
        "mian": r"revision 'mian': .*repo has no such commit; did you mean main\?",
        "-x": "revision '-x': expected a commit, a branch or a tag",
        "": "revision '': expected a commit, a branch or a tag",
    }.items():
        with pytest.raises(RevisionError, match=expected):
            repository_at(str(here.root)).commit(revision)
    with pytest.raises(RevisionError, match="not part of the history"):
        rt.diff("pkg.model:build", git=("side", "main~2"), bisect="time>5%")
    with pytest.raises(RevisionError, match="is in no git repository"):
        rt.diff(f"{tmp_path}/model.py:build", git="main")
    git(tmp_path, "clone", "-q", "--bare", str(here.root), "bare")
    with pytest.raises(RevisionError, match="the repository is bare"):
        repository_at(str(tmp_path / "bare"))
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{here.root}", "shallow")
    with pytest.raises(RevisionError, match="git fetch --unshallow"):
        repository_at(str(tmp_path / "shallow")).commit("HEAD~1")
    base, why = repository_at(str(here.root)).base()  # on main, nothing uncommitted
    assert (base.subject, why[:22]) == ("Merge side", "the commit before HEAD")
    submodules_are_checked_out_where_this_clone_has_them(here, tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RevisionError, match="there is no program git"):
        repository_at(str(here.root))


def submodules_are_checked_out_where_this_clone_has_them(
    here: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the test above: no process of Python starts here, but git's do."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outer = tmp_path / "outer"
    git(tmp_path, "init", "-q", "-b", "main", "outer")
    git(
        outer,
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "add",
        "-q",
        f"{here.root}",
        "deps/m",
    )
    git(outer, "commit", "-q", "-m", "With the last one")
    git(outer / "deps/m", "checkout", "-q", here.hashes["The model"])
    git(outer, "commit", "-q", "-a", "-m", "With the first one")
    (outer / "deps/m/src/pkg/unused.py").write_text("D = 1")
    repository = repository_at(str(outer))
    assert str(repository.state()) == "1 file changed, submodule deps/m differs"
    for revision, content in (("HEAD~1", "C = 1\n"), ("HEAD", "")):
        hash_ = repository.commit(revision).hash
        with repositories.checked_out(repository, hash_) as checkout:
            assert checkout.missing == () and Path(checkout.root).name == "outer"
            file = Path(checkout.root, "deps/m/src/pkg/unused.py")
            assert file.read_text() == content
    git(tmp_path, "clone", "-q", "outer", "without")
    without = repository_at(str(tmp_path / "without"))
    with repositories.checked_out(without, without.commit("HEAD").hash) as checkout:
        assert checkout.missing == ("deps/m",)
