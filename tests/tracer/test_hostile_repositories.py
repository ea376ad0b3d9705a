"""What stands in a `.git` folder runs nothing: filters, drivers, hooks, transports, included files.

A clone brings no `.git/config`, but an archive does, and so does a bare repository that is
committed as plain files.
"""

from __future__ import annotations

import string
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rooftrace.diffs.git import RevisionError, origins, repositories
from rooftrace.diffs.git.repositories import Repository, repository_at
from tests.repositories import git

HOOKS = (
    "fsmonitor-watchman",
    "post-checkout",
    "post-index-change",
    "pre-commit",
    "query-watchman",
    "reference-transaction",
)
CONFIG = """
[core]
  fsmonitor = {fsmonitor}
  hooksPath = {hooks}
  sshCommand = {ssh}
  gitProxy = {proxy}
  askPass = {askpass}
  pager = {pager}
  editor = {editor}
  alternateRefsCommand = {alternates}
  attributesFile = {attributes}
[filter "one"]
  clean = {clean}
  smudge = {smudge}
[filter "two"]
  process = {process}
  required = true
[diff]
  external = {external}
[diff "own"]
  textconv = {textconv}
  command = {command}
[merge "own"]
  driver = {driver}
[gpg]
  program = {gpg}
[log]
  showSignature = true
[pager]
  log = {pager}
  blame = {pager}
  status = {pager}
  rev-parse = {pager}
[alias]
  log = !{alias}
  rev-parse = !{alias}
[hook "own"]
  command = {hook}
  event = post-checkout
  event = post-index-change
  event = reference-transaction
[remote "origin"]
  url = ext::{transport}
  promisor = true
  uploadpack = {uploadpack}
[protocol]
  allow = always
[protocol "ext"]
  allow = always
[credential]
  helper = {credential}
[submodule]
  recurse = true
[submodule "sub"]
  update = !{update}
  active = true
[uploadpack]
  packObjectsHook = {packing}
[include]
  path = more
[includeIf "gitdir:**/worktrees/**"]
  path = worktrees
[lfs]
  standalonetransferagent = own
[lfs "customtransfer.own"]
  path = {lfs}
[lfs "extension.own"]
  clean = {lfs}
  smudge = {lfs}
"""
MORE = """
[filter "three"]
  smudge = {included}
  clean = {included}
[filter "four"]
  process = {included}
"""
ATTRIBUTES = """\
*.one filter=one diff=own merge=own
*.two filter=two diff=own
*.three filter=three diff=own
*.four filter=four diff=own
*.lfs filter=lfs diff=lfs merge=lfs
*.json filter=one diff=own ident
"""
FILES = ("a.one", "b.two", "c.three", "d.four", "e.lfs", "config.json")


class Hostile:
    """A repository with two commits, a submodule and edited files; what ran writes its name."""

    def __init__(self, folder: Path) -> None:
        self.ran_file = folder / "ran"
        self.root = folder / "repo"
        self._programs = folder / "programs"
        self._programs.mkdir()
        inner = self._made(folder / "inner", "inner")
        root = self._made(self.root, "first")
        git(root, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
        self.signed(root, "second")
        for name in FILES:
            (root / name).write_text("first\nsecond\n")
        git(root, "commit", "-q", "-a", "-m", "third")
        for name in FILES:  # as long as before and newer: git has to read them
            (root / name).write_text("first\nsecon_\n")
            (root / "sub" / name).write_text("inne_\n")
        self.turn(root / ".git")
        self.turn(root / ".git" / "modules" / "sub")

    def _made(self, root: Path, text: str) -> Path:
        root.mkdir()
        git(root, "init", "-q", "-b", "main")
        (root / ".gitattributes").write_text(ATTRIBUTES)
        (root / ".gitignore").write_text("*.ignored\n")
        for name in FILES:
            (root / name).write_text(f"{text}\n")
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", text)
        return root

    def signed(self, root: Path, subject: str) -> None:
        """A commit with a signature, so that `log.showSignature` has something to check."""
        signer = self._programs / "signer"
        signer.write_text(
            "#!/bin/sh\ncat >/dev/null\necho '[GNUPG:] SIG_CREATED ' >&2\n"
            "echo '-----BEGIN PGP SIGNATURE-----'; echo x; echo '-----END PGP SIGNATURE-----'\n"
        )
        signer.chmod(0o755)
        git(root, "-c", f"gpg.program={signer}", "commit", "-q", "-S", "-m", subject)

    def turn(self, folder: Path) -> None:
        """Let everything in a `.git` folder that can name a program name one."""
        places = {"hooks", "attributes"}
        programs = {name: self.program(name) for name in _placeholders(CONFIG + MORE) - places}
        hooks = self._programs / "hooks"
        hooks.mkdir(exist_ok=True)
        for place in (hooks, folder / "hooks"):
            place.mkdir(exist_ok=True)
            for name in HOOKS:
                (place / name).write_text(Path(self.program(f"hook {name}")).read_text())
                (place / name).chmod(0o755)
        programs["hooks"] = str(hooks)
        programs["attributes"] = str(folder / "info" / "attributes")
        (folder / "info").mkdir(exist_ok=True)
        (folder / "info" / "attributes").write_text("*.lfs filter=three\n")
        with (folder / "config").open("a") as file:
            file.write(CONFIG.format(**programs))
        (folder / "more").write_text(MORE.format(**programs))
        (folder / "worktrees").mkdir(exist_ok=True)

    def program(self, name: str) -> str:
        """A program that writes its name down, and passes its input on as a filter would."""
        path = self._programs / name.replace(" ", "-")
        path.write_text(f"#!/bin/sh\necho '{name}' >>'{self.ran_file}'\nexec cat\n")
        path.chmod(0o755)
        return str(path)

    def ran(self) -> list[str]:
        """Names of what ran."""
        return sorted(set(self.ran_file.read_text().split("\n"))) if self.ran_file.exists() else []


def _placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hostile:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = Hostile(tmp_path)
    assert not made.ran(), "making the repository ran something already"
    return made


def _all_questions(repository: Repository) -> None:
    """Everything that a diff asks of a repository."""
    base, _ = repository.base()
    head = repository.commit("HEAD")
    first = repository.commit("HEAD~2")
    assert repository.commits(first.hash, head.hash)
    assert repository.is_ancestor(first.hash, head.hash)
    assert repository.parents(head.hash) and repository.merge_base("main", first.hash)
    assert repository.state().changed >= len(FILES) and base == head
    assert repository.state().submodules == ("sub",)
    assert repository.ignored == ()
    assert {*FILES, "sub/a.one"} <= repository.tracked()
    assert set(FILES) <= repository.tree(head.hash).keys()
    assert repository.touching(first.hash, head.hash, list(FILES))
    assert set(repository.uncommitted(list(FILES))) == set(FILES)
    assert repository.last_change("a.one") == head
    assert repository.added("a.one") == first
    for name in FILES:
        assert origins.wrote(repository, first.hash, None, f"{name}:2") == "not committed yet"
        assert origins.wrote(repository, first.hash, head.hash, f"{name}:2") == head
        origins.removed(repository, first.hash, None, f"{name}:1")


def test_questions_to_a_repository_run_nothing_of_its_own(hostile: Hostile) -> None:
    repository = repository_at(str(hostile.root))
    _all_questions(repository)
    assert hostile.ran() == []


def test_git_itself_runs_what_the_repository_names(hostile: Hostile) -> None:
    """What the other tests would miss if the attack were none."""
    commands = [["diff", "--", name] for name in FILES]
    commands += [["log", "-2"], ["blame", "a.one"], ["checkout", "-f", "HEAD~2", "--", "a.one"]]
    commands += [["branch", "more"]]
    for command in commands:
        program = ["git", *command]
        subprocess.run(
            program, cwd=hostile.root, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    ran = set(hostile.ran())
    assert {"clean", "smudge", "process", "textconv", "fsmonitor", "included", "gpg"} <= ran
    assert any(name.startswith("hook ") for name in ran)


def test_a_checkout_runs_nothing_of_the_repository(hostile: Hostile, tmp_path: Path) -> None:
    repository = repository_at(str(hostile.root))
    before = {p: p.read_bytes() for p in hostile.root.rglob("*") if p.is_file()}
    with repositories.checked_out(repository, repository.commit("HEAD").hash) as checkout:
        assert checkout.missing == ()
        for name in FILES:
            assert Path(checkout.root, name).read_text() == "first\nsecond\n"
            assert Path(checkout.root, "sub", name).read_text() == "inner\n"
        # The code of a target may ask git where it is, and still nothing of the other runs.
        assert git(Path(checkout.root), "rev-parse", "HEAD") == repository.commit("HEAD").hash
        assert git(Path(checkout.root), "status", "--porcelain") == ""
        assert git(Path(checkout.root), "rev-parse", "--verify", "main")
    assert hostile.ran() == []
    assert {p: p.read_bytes() for p in hostile.root.rglob("*") if p.is_file()} == before
    assert not list(tmp_path.glob(".rooftrace*"))


def test_a_file_that_is_included_only_in_a_worktree_runs_nothing(hostile: Hostile) -> None:
    """`includeIf "gitdir:"` may hold for a worktree of the repository and not for itself."""
    config = hostile.root / ".git" / "config"
    config.write_text(config.read_text() + '[includeIf "gitdir:**"]\n  path = more\n')
    repository = repository_at(str(hostile.root))
    with repositories.checked_out(repository, repository.commit("HEAD~1").hash):
        pass
    assert hostile.ran() == []


@pytest.mark.parametrize("remote", ["ext", "file"])
def test_what_a_partial_clone_lacks_is_not_fetched(hostile: Hostile, remote: str) -> None:
    root = hostile.root
    blob = git(root, "-c", "core.fsmonitor=false", "rev-parse", "HEAD:a.one")
    for path in (root / ".git/objects").rglob("*"):
        if path.is_file() and path.parent.name + path.name == blob:
            path.unlink()
    (root / ".git/objects/pack").mkdir(exist_ok=True)
    with (root / ".git/config").open("a") as file:
        file.write("\n[core]\nrepositoryformatversion = 1\n[extensions]\npartialClone = origin\n")
        file.write(f'[remote "origin"]\nurl = {root.parent}/inner\n' if remote == "file" else "")
    hostile.ran_file.unlink(missing_ok=True)
    repository = repository_at(str(root))
    with pytest.raises(RevisionError, match=r"read-tree: .*(a\.one|object|" + blob + ")"):
        repositories.checked_out(repository, repository.commit("HEAD").hash).__enter__()
    with pytest.raises(RevisionError, match="no such commit"):
        repository.commit("0123456789012345678901234567890123456789")
    assert hostile.ran() == []


def test_a_repository_that_lies_in_another_one_as_files_is_not_used(tmp_path: Path) -> None:
    """A clone can bring a bare repository: HEAD, objects, refs and a config with programs."""
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q", "-b", "main")
    inner = outer / "models"
    (inner / "objects").mkdir(parents=True)
    (inner / "refs").mkdir()
    (inner / "HEAD").write_text("ref: refs/heads/main\n")
    (inner / "config").write_text(
        f'[core]\nbare = false\nworktree = {outer}\nfsmonitor = "touch {tmp_path}/ran"\n'
    )
    (inner / "config.json").write_text("{}")
    git(outer, "commit", "-q", "--allow-empty", "-m", "first")
    with pytest.raises(RevisionError, match="is bare"):
        repository_at(str(inner))
    assert not (tmp_path / "ran").exists()


def test_a_working_tree_elsewhere_is_refused(tmp_path: Path) -> None:
    root, private = tmp_path / "repo", tmp_path / "private"
    private.mkdir()
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    git(root, "commit", "-q", "--allow-empty", "-m", "first")
    git(root, "config", "core.worktree", str(private))
    with pytest.raises(RevisionError, match=r"private \(core\.worktree\)"):
        repository_at(str(root))


def test_an_object_that_is_replaced_is_the_one_of_its_hash(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    (root / "a").write_text("real\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    (root / "b").write_text("other\n")
    other = git(root, "hash-object", "-w", "b")
    git(root, "replace", git(root, "rev-parse", "HEAD:a"), other)
    assert git(root, "cat-file", "-p", "HEAD:a") == "other"
    repository = repository_at(str(root))
    with repositories.checked_out(repository, repository.commit("HEAD").hash) as checkout:
        assert Path(checkout.root, "a").read_text() == "real\n"


def _line_ends(root: Path) -> None:
    git(root, "config", "core.autocrlf", "true")
    (root / "a.txt").unlink()
    git(root, "checkout", "--", "a.txt")
    assert (root / "a.txt").read_bytes() == b"one\r\nthree\r\n"


def _split(root: Path) -> None:
    git(root, "update-index", "--split-index")


def _borrowing(root: Path) -> None:
    """Objects in a folder that is named relative to another, by way of a second one."""
    folder = root / ".git"
    (folder / "objects").rename(folder / "kept")
    for name, to in (("objects", "lent"), ("lent", "kept")):
        (folder / name / "info").mkdir(parents=True)
        (folder / name / "info" / "alternates").write_text(f"../{to}\n")


def _shallow(root: Path) -> None:
    hash_ = git(root, "rev-parse", "HEAD")
    (root / ".git" / "shallow").write_text(f"{hash_}\n")


def _packed(root: Path) -> None:
    git(root, "gc", "-q")


def _worktree(root: Path) -> None:
    git(root, "worktree", "add", "-q", "--detach", "linked")


@pytest.mark.parametrize(
    "form", [_line_ends, _split, _borrowing, _shallow, _packed, _worktree, "sha256"]
)
def test_forms_of_repositories_give_what_git_gives(
    tmp_path: Path, form: Callable[[Path], None] | str
) -> None:
    """Line ends, split indexes, lent objects, shallow and packed ones, worktrees, SHA-256."""
    root = tmp_path / 'a "strange"\nname é'
    root.mkdir()
    git(root, "init", "-q", "-b", "main", *(["--object-format=sha256"] * (form == "sha256")))
    (root / "a.txt").write_text("one\ntwo\n")
    (root / ".gitignore").write_text("linked\n")
    (root / ".git" / "info" / "exclude").write_text("*.private\n")
    (root / "b.private").write_text("x")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    (root / "a.txt").write_text("one\nthree\n")
    git(root, "commit", "-q", "-a", "-m", "second")
    git(root, "tag", "v1")
    if not isinstance(form, str):
        form(root)
    where = root / "linked" if form is _worktree else root
    repository = repository_at(str(where))
    assert repository.root == str(where)
    assert str(repository.state()) == "nothing changed"
    assert repository.ignored == (() if form is _worktree else ("b.private",))
    head = repository.commit("v1")
    told = origins.wrote(repository, head.hash, None, "a.txt:2")
    assert told is None  # no commit after the last one wrote it
    (where / "a.txt").write_text("one\nfour\n")
    assert str(repository.state()) == "1 file changed"
    assert repository.uncommitted(["a.txt"]) == ["a.txt"]
    count = 1 if form is _shallow else 2
    assert git(where, "rev-list", "--count", "HEAD") == str(count)
    assert repository.touching(f"{head.hash}", head.hash, ["a.txt"]) == []
    with repositories.checked_out(repository, head.hash) as checkout:
        ends = b"one\r\nthree\r\n" if form is _line_ends else b"one\nthree\n"
        assert Path(checkout.root, "a.txt").read_bytes() == ends
        assert git(Path(checkout.root), "describe", "--tags") == "v1"
