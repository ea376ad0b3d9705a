"""Without git or a process: searching a range of commits, and leading imports into a checkout."""

from __future__ import annotations

import math
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rooftrace.diffs.git import first_bad
from rooftrace.diffs.git.origins import DiffOrigins, SideOrigin
from rooftrace.diffs.git.repositories import State
from rooftrace.tracer.phases.apart import ProcessPlace
from rooftrace.tracer.phases.starting import MovedFinder, Moves

pytestmark = pytest.mark.quick


@given(st.lists(st.sampled_from([True, True, False]), max_size=40), st.data())
def test_the_first_bad_commit_is_found_between_those_that_cannot_be_tried(
    builds: list[bool], data: st.DataObject
) -> None:
    builds = [*builds, True]  # the last one is known to be bad
    first = data.draw(st.integers(0, len(builds) - 1))
    tried: list[int] = []

    def holds(number: int) -> bool | None:
        tried.append(number)
        return number >= first if builds[number] else None

    crossing = first_bad(len(builds), holds)
    # By hand: the last that builds before the first bad one, and the first that builds from it on.
    good = max((i for i in range(first) if builds[i]), default=-1)
    bad = next(i for i in range(first, len(builds)) if builds[i])
    assert (crossing.good, crossing.bad) == (good, bad)
    assert crossing.untold == tuple(range(good + 1, bad))
    assert len(tried) == len(set(tried)), "a commit is tried once"
    if all(builds):
        assert len(tried) <= math.ceil(math.log2(len(builds) + 1))


def test_many_commits_that_do_not_build_are_jumped_over() -> None:
    tried = []

    def holds(number: int) -> bool | None:
        tried.append(number)
        return None if 300 <= number < 700 else number >= 900

    assert first_bad(1000, holds).bad == 900
    assert len(tried) < 20


@pytest.fixture
def moves(tmp_path: Path) -> Moves:
    """A repository, and a checkout of it with other files, beside an environment."""
    old, new = tmp_path / "repo", tmp_path / "checkout" / "repo"
    for root, text in ((old, "old"), (new, "new")):
        (root / "src" / "pkg" / "sub").mkdir(parents=True)
        (root / "src" / "pkg" / "__init__.py").write_text(text)
        (root / "src" / "pkg" / "sub" / "__init__.py").write_text(text)
    (old / "src" / "pkg" / "later.py").write_text("not in that revision")
    (old / "src" / "pkg" / "built.py").write_text("git ignores it")
    (old / "src" / "pkg" / "untracked.py").write_text("not committed")
    (old / ".venv/lib/site-packages/lib").mkdir(parents=True)
    (old / ".venv/lib/site-packages/lib/__init__.py").write_text("installed")
    (tmp_path / "link").symlink_to(old / "src")
    return Moves(str(old), str(new), ["src/pkg/built.py", ".venv/", "build/"])


def test_every_way_to_a_module_leads_into_the_checkout(moves: Moves, tmp_path: Path) -> None:
    finder = MovedFinder(PathFinder, moves)
    src, new = f"{moves.before}src", f"{moves.after}src"
    for path in ([src], [new], [str(tmp_path / "link")], ["/nowhere", src]):
        spec = finder.find_spec("pkg", path)
        assert spec.origin == f"{new}/pkg/__init__.py", path
        assert spec.submodule_search_locations == [f"{new}/pkg"]
        assert finder.find_spec("pkg.sub", [f"{src}/pkg"]).origin == f"{new}/pkg/sub/__init__.py"
    inside = [f"{new}/pkg"]
    # What is only in the working tree is not there, unless a build made it and git ignores it.
    for name in ("later", "untracked"):
        for path in (inside, [f"{src}/pkg"]):
            assert finder.find_spec(f"pkg.{name}", path) is None
    assert finder.find_spec("pkg.built", inside).origin == f"{src}/pkg/built.py"
    # An environment inside of the repository stays where it is.
    packages = f"{moves.before}.venv/lib/site-packages"
    assert moves.path([src, packages, "/usr/lib", ""]) == [new, packages, "/usr/lib", ""]
    assert finder.find_spec("lib", [packages]).origin == f"{packages}/lib/__init__.py"


def test_a_place_has_its_folder_its_target_and_its_messages(
    moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = moves.before[:-1], moves.after[:-1]
    place = ProcessPlace(root=new, repository=old, ignored=moves.ignored)
    monkeypatch.chdir(f"{old}/src/pkg")
    monkeypatch.setenv("PYTHONPATH", f"{old}/src:/usr/lib")
    assert place.folder == f"{new}/src/pkg"
    assert place.target(f"{old}/src/m.py:build") == f"{new}/src/m.py:build"
    assert place.target("m.py:build") == "m.py:build"
    assert place.environment()["PYTHONPATH"] == f"{new}/src:/usr/lib"
    assert place.here(f"{new}/src/m.py:3 in f") == "src/m.py:3 in f"
    assert ProcessPlace().folder == "" and ProcessPlace().here(old) == old


def test_a_state_says_what_differs_and_versions_are_compared_where_both_are_known() -> None:
    assert str(State(2, 1, ("libs/x",))) == "2 files changed, 1 untracked, submodule libs/x differs"
    assert str(State()) == "nothing changed" and State().is_clean
    sides = [
        SideOrigin(target="", versions={"torch": "2.11.0", "Python": "3.12.1", "a": "1"}),
        SideOrigin(target="", versions={"torch": "2.13.0", "Python": "3.12.1"}),
    ]
    assert DiffOrigins(before=sides[0], after=sides[1]).versions() == ["torch 2.11.0 -> 2.13.0"]
