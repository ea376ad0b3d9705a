"""What a lock or a pyproject.toml names is run, read and written only inside of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rooftrace.errors import RequestError
from rooftrace.reporting.gates import lock as records, lockfile
from rooftrace.reporting.gates.lockfile import load_settings, project_of
from tests.reporting.conftest import Run
from tests.reporting.gate_support import MODELS, SETTINGS, repository

EVIL = "open({ran!r}, 'a').write('ran')\n"


@pytest.fixture
def project(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which a person stands, beside a file that notes that it ran."""
    root = tmp_path / "project"
    root.mkdir()
    repository(root)
    (root / "evil.py").symlink_to(tmp_path / "evil.py")
    (root / "linked").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").mkdir()
    for path in ("evil.py", "outside/evil.py", "outside/__init__.py"):
        text = EVIL.format(ran=str(tmp_path / "ran"))
        (tmp_path / path).write_text(text + MODELS)
    monkeypatch.chdir(root)
    return root


def write_lock(path: Path, target: str, **asked: object) -> None:
    """A lock that asks for a target; written by hand, so that nothing is run."""
    made = records.MadeFrom(rooftrace="0", torch="0", depth=3)
    costs = records.LockedCosts(time="0 s", flops=0, bytes=0, memory=0, params=0, kernels=0)
    phase = records.LockedPhase(costs={"h200-sxm": {"eager": costs}})
    each = records.LockedTarget(
        asked={"target": target, **asked},  # type: ignore[dict-item]
        sources={},
        phases={"forward": phase},
    )
    path.write_text(lockfile.lock_text(records.Lock(made_from=made, targets={"net": each})))


def refused(ran: object, *words: str) -> None:
    code, out, err = ran.code, ran.out, ran.err  # type: ignore[attr-defined]
    assert code == 2 and out == "" and all(word in err for word in words), (code, out, err)
    assert err.startswith("rooftrace: ") and "Traceback" not in err
    assert not (Path.cwd().parent / "ran").exists()


OUTSIDE = {
    "../evil.py:net": "target net = '../evil.py:net'",
    "{tmp}/evil.py:net": "evil.py:net'",
    "sub/../../evil.py:net": "outside of the project",
    "evil.py:net": "outside of the project",  # a link
    "linked/evil.py:net": "outside of the project",
    "linked.evil:net": "outside of the project",
    "linked:net": "outside of the project",
    "../evil.py --batch 2": "outside of the project",
    "run:../evil.py": "outside of the project",
    "run:python {tmp}/evil.py models.py": "outside of the project",
    "run:A=models.py ../evil.py": "outside of the project",
    "run:-m linked.evil": "outside of the project",
    "run:torchrun --nproc-per-node 2 ../evil.py models.py": "outside of the project",
}


@pytest.mark.parametrize("target", OUTSIDE)
@pytest.mark.parametrize("by", ["lock", "settings", "former"])
def test_code_outside_of_the_project_is_not_run(
    project: Path, run: Run, target: str, by: str
) -> None:
    """Named by a lock, by settings, or by a lock whose costs would be explained."""
    (project / "sub").mkdir()
    name, said = target.format(tmp=project.parent), OUTSIDE[target]
    settings = SETTINGS.partition("[tool.rooftrace.targets]")[0]
    table = {"lock": "", "settings": f'net = "{name}"', "former": 'net = "models.py:net"'}[by]
    text = f"{settings}[tool.rooftrace.targets]\n{table}\n"
    (project / "pyproject.toml").write_text(text)
    write_lock(project / "costs.lock", "models.py:net" if by == "settings" else name)
    for words in (["check"], ["check", "--dry-run"], *([["lock"]] * (by == "settings"))):
        refused(run(*words), said, "outside of the project")


def test_rules_outside_of_the_project_are_not_run(project: Path, run: Run) -> None:
    for path in ("../evil.py", str(project.parent / "evil.py"), "evil.py"):
        (project / "pyproject.toml").write_text(
            SETTINGS.replace("phases =", f'rules = ["{path}"]\nphases =')
        )
        refused(run("lock"), f"rules {path!r}", "outside of the project")
        write_lock(project / "costs.lock", "models.py:net")
        refused(run("check"), f"rules {path!r}", "outside of the project")
        (project / "costs.lock").unlink()


def test_a_lock_from_elsewhere_runs_nothing(project: Path, run: Run) -> None:
    """Not even code of the project: a stranger's file would say which of it."""
    lock = project.parent / "evil.lock"
    write_lock(lock, "models.py:net")
    for path in ("../evil.lock", str(lock)):
        refused(run("check", "--lock", path), "evil.lock", "outside of the project")
        refused(run("check", "--lock", path, "--update"), "outside of the project")
    (project / "costs.lock").symlink_to(lock)
    refused(run("check"), "costs.lock", "outside of the project")
    before = lock.read_bytes()
    refused(run("check", "--update"), "outside of the project")
    refused(run("lock"), "costs.lock", "outside of the project")
    (project / "pyproject.toml").unlink()
    (project / ".git").mkdir()
    refused(run("lock", "models.py:net"), "costs.lock", "outside of the project")
    assert lock.read_bytes() == before and (project / "costs.lock").is_symlink()


@pytest.mark.parametrize("path", ["../../x.lock", "../x.lock", "{tmp}/x.lock", "linked/x.lock"])
def test_settings_write_no_lock_outside_of_the_project(project: Path, run: Run, path: str) -> None:
    path = path.format(tmp=project.parent)
    (project / "pyproject.toml").write_text(
        SETTINGS.replace("phases =", f'lock = "{path}"\nphases =')
    )
    for words in (["lock"], ["check"], ["check", "--update"], ["lock", "--dry-run"]):
        refused(run(*words), f"lock = {path!r}", "outside of the project")
    assert not list(project.parent.rglob("x.lock"))


def test_a_dry_run_lists_the_code_and_runs_none(project: Path, run: Run) -> None:
    (project / "rules.py").write_text("raise SystemExit(7)")
    (project / "models.py").write_text("raise SystemExit(7)")
    (project / "pyproject.toml").write_text(
        SETTINGS.replace("phases =", 'rules = ["rules.py"]\nphases =')
        + 'config = "configs/x.json"\nown = { target = "hf:a/b", trust_remote_code = true }\n'
        + 'script = "train.py --batch 2"\n'
    )
    (project / "train.py").write_text("raise SystemExit(7)")
    listed = [
        f"project  {project}",
        "lock     costs.lock",
        "runs     rules.py  (rules)",
        "runs     models.py:net  (target net)",
        "runs     models.py:cnn  (target cnn)",
        "runs     hf:a/b  (target own, with code of its repository)",
        "runs     train.py --batch 2  (target script)",
    ]
    ran = run("lock", "--dry-run")
    assert (ran.code, ran.out.splitlines()) == (0, listed), ran.err
    assert not (project / "costs.lock").exists()
    write_lock(project / "costs.lock", "models.py:before")
    ran = run("check", "--dry-run")
    last = "runs     models.py:before  (target net)"
    assert (ran.code, ran.out.splitlines()) == (0, [*listed, last])
    (project / "sub").mkdir()
    os.chdir(project / "sub")
    ran = run("check", "--dry-run")
    assert ran.out.splitlines()[1] == "lock     ../costs.lock"


def test_names_on_the_command_line_are_those_of_the_folder(project: Path, run: Run) -> None:
    """In a subfolder "models.py:net" would run the file of that name in the folder above."""
    (project / "sub").mkdir()
    os.chdir(project / "sub")
    Path("models.py").write_text(MODELS)
    (project / "models.py").write_text("raise SystemExit(7)")
    for words in (["models.py:net"], ["--rules", "models.py"]):
        ran = run("lock", *words)
        assert ran.code == 2 and words[-1] in ran.err and str(project) in ran.err
    assert not list(project.rglob("costs.lock"))


# -- which project ---------------------------------------------------------------------------------


def test_the_nearest_folder_with_a_mark_is_the_project(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner" / "deep"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "pyproject.toml").write_text(SETTINGS)
    assert project_of(inner) == tmp_path / "outer"
    assert load_settings(inner).targets.keys() == {"net", "cnn"}
    for mark in (".git", "pyproject.toml"):
        made = inner.parent / mark
        made.touch()
        assert project_of(inner) == inner.parent, mark
        settings = load_settings(inner)  # what lies above it is another project
        assert (settings.targets, settings.folder) == ({}, inner), mark
        made.unlink()


def test_a_project_over_the_folder_of_another_user_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /tmp/pyproject.toml would be over everything in /tmp."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    mine = tmp_path / "shared" / "mine"
    mine.mkdir(parents=True)
    monkeypatch.chdir(mine)
    (mine.parent / "models.py").write_text(EVIL.format(ran=str(mine.parent / "ran")) + MODELS)
    for mark, text in (("pyproject.toml", SETTINGS), (".git", "")):
        path = mine.parent / mark
        path.write_text(text)
        os.chown(path, 54321, 54321)
        refused(run("lock"), str(path), "does not belong to the user", "stand in")
        refused(run("check"), str(path))
        assert not (mine.parent / "ran").exists()
        assert project_of(mine.parent) == mine.parent  # who stands there has chosen it
        (mine / "pyproject.toml").write_text(SETTINGS)
        assert project_of(mine) == mine
        (mine / "pyproject.toml").unlink()
        path.unlink()
    with pytest.raises(RequestError, match="lies outside"):
        (mine / "pyproject.toml").write_text('[tool.rooftrace]\nlock = ".."')
        load_settings(mine)
