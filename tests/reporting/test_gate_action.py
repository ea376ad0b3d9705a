"""The GitHub Action, run step by step as a runner does, against code of a pull request.

The code stands in for what `rooftrace check` runs: it has the same rights, and is quicker.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rooftrace.reporting.gates import posting, reports
from tests.reporting.gate_support import CASTS, MODELS, SETTINGS, repository
from tests.reporting.test_gate_comments import TOKEN, Handler, Server

yaml: Any = pytest.importorskip("yaml")
ACTION = ".github/actions/check"
POSTING = "rooftrace/reporting/gates/posting.py"
POSIX = pytest.mark.skipif(os.name != "posix", reason="the steps are for Linux and macOS")


class PullHandler(Handler):
    """Knows the open pull requests too."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not url.path.endswith("/pulls"):
            return self._do()
        (head,) = parse_qs(url.query)["head"]
        pulls = [
            {"number": 12, "head": {"sha": "c0ffee", "at": "fork:topic"}},
            {"number": 13, "head": {"sha": "beef", "at": "fork:topic"}},
            {"number": 14, "head": {"sha": "c0ffee", "at": "other:topic"}},
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([p for p in pulls if p["head"]["at"] == head]).encode())  # type: ignore[index]
        return None


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as state:
        state.RequestHandlerClass = PullHandler
        thread = threading.Thread(target=state.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        state.shutdown()
        thread.join()


class Runner:
    """Runs the steps of action.yml: what a step writes into the runner's files holds for the next.

    The token is in no environment but that of a step which asks for it.
    """

    def __init__(self, root: Path, folder: Path, url: str) -> None:
        self.temp, self.release = folder / "temp", folder / "_actions" / "rooftrace"
        self.action = self.release / ACTION
        self.workspace = folder / "workspace"
        for made in (self.temp, self.workspace, self.action, (self.release / POSTING).parent):
            made.mkdir(parents=True)
        for name in (f"{ACTION}/action.yml", f"{ACTION}/action.sh", POSTING):
            shutil.copy(root / name, self.release / name)
        self.event = folder / "event.json"
        self.event.write_text(json.dumps({"pull_request": {"number": 12}}))
        self.own = {
            "GITHUB_ACTIONS": "true",
            "GITHUB_REPOSITORY": "owner/models",
            "GITHUB_API_URL": url,
            "GITHUB_EVENT_PATH": str(self.event),
            "RUNNER_TEMP": str(self.temp),
        }
        self.job: dict[str, str] = {}  # of `env:` in the workflow
        self.github = {"github.event.pull_request.number": "12", "github.token": TOKEN}
        self.steps = yaml.safe_load((root / ACTION / "action.yml").read_text())  # before any step
        self.outcomes: list[tuple[str, int, str]] = []

    def run(self, **inputs: str) -> int:
        """Exit code of the action."""
        known = {name: str(one["default"]) for name, one in self.steps["inputs"].items()}
        values = {**self.github, "github.action_path": str(self.action)}
        values["runner.temp"] = str(self.temp)
        for name, text in {**known, **inputs}.items():
            values[f"inputs.{name.replace('_', '-')}"] = self._filled(text, values)
        passed, path, failed = dict(self.job), os.environ["PATH"], 0
        for number, step in enumerate(self.steps["runs"]["steps"]):
            if not self._asked(step["if"], values):
                continue
            files = {name: self.temp / f"{name}-{number}" for name in ("ENV", "PATH", "OUTPUT")}
            files["STEP_SUMMARY"] = self.temp / f"summary-{number}.md"
            for file in files.values():
                file.touch()
            env = {"PATH": path, "HOME": str(self.temp), **passed}
            env |= {name: self._filled(str(text), values) for name, text in step["env"].items()}
            env |= self.own | {f"GITHUB_{name}": str(file) for name, file in files.items()}
            code, out = self._step(step, env, number)
            self.outcomes.append((step["id"], code, out))
            failed = failed or (0 if step.get("continue-on-error") else code)
            passed |= dict(_lines_of(files["ENV"]))
            path = os.pathsep.join([*reversed(files["PATH"].read_text().split()), path])
        return failed

    def _step(
        self, step: Mapping[str, Any], env: Mapping[str, str], number: int
    ) -> tuple[int, str]:
        script = self.temp / f"script-{number}"
        script.write_text(step["run"])
        shell = {"bash": "bash --noprofile --norc -e -o pipefail {0}"}.get(step["shell"])
        first, *words = shlex.split(shell or step["shell"])
        program = first if os.path.isabs(first) else shutil.which(first, path=env["PATH"])
        if not os.path.exists(str(program)):
            pytest.skip(f"there is no {program}")
        done = subprocess.run(
            [str(program), *(word.replace("{0}", str(script)) for word in words)],
            cwd=self.workspace,
            env=dict(env),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def _filled(self, text: str, values: Mapping[str, str]) -> str:
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values.get(match[1], ""), text)

    def _asked(self, text: str, values: Mapping[str, str]) -> bool:
        conditions = text.removeprefix("${{ ").removesuffix(" }}").split(" && ")
        told = [re.fullmatch(r"(\S+) == '(.*)'", c) for c in conditions if c != "!cancelled()"]
        assert all(told), text
        return all(values[match[1]] == match[2] for match in told if match)


def _lines_of(file: Path) -> Iterator[tuple[str, str]]:
    """What the runner takes from GITHUB_ENV: NAME=VALUE, without names that are its own."""
    for line in file.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not name.startswith(("GITHUB_", "RUNNER_", "NODE_OPTIONS")):
            yield name, value


@pytest.fixture
def runner(root: Path, tmp_path: Path, server: Server) -> Runner:
    return Runner(root, tmp_path, server.url)


CHECK = """\
#!{python} -IS
# Stands in for `python -m rooftrace check --format github --out FILE`: code of a pull request.
import os, sys, glob, pathlib, stat
out = sys.argv[sys.argv.index("--out") + 1]
loot = pathlib.Path({loot!r})
text = "{marker}\\n### Costs\\nfrom the check\\n"
pathlib.Path(out).write_text(text)
def spy(name):
    "A program that tells that it ran, and what it was given."
    return ("#!/bin/sh\\necho " + name + " >>" + str(loot / "ran") + "\\n"
            "cat /proc/$$/environ /proc/$PPID/environ >>" + str(loot / "environ") + "\\n")
def program(path, name):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(spy(name))
    path.chmod(0o755)
temp, action = pathlib.Path({temp!r}), pathlib.Path({action!r})
release = action.parents[2]
{attack}
sys.exit({code})
"""
PYTHON_SPY = (
    "import os; open({loot!r} + '/ran', 'a').write('{name}\\n'); os.environ.get('GITHUB_TOKEN')"
)


def check_with(runner: Runner, attack: str, code: int = 0) -> str:
    """The path of a Python that runs an attack in place of the check."""
    loot = runner.temp.parent / "loot"
    loot.mkdir(exist_ok=True)
    path = runner.temp.parent / "python"
    path.write_text(
        CHECK.format(
            python=os.path.realpath(sys.executable),
            loot=str(loot),
            marker=reports.MARKER,
            temp=str(runner.temp),
            action=str(runner.action),
            attack=attack,
            code=code,
        )
    )
    path.chmod(0o755)
    return str(path)


def looted(runner: Runner) -> str:
    """What the code of the pull request brought home, the token above all."""
    files = [p for p in runner.temp.parent.rglob("*") if p.is_file()]
    held = [p.name for p in files if TOKEN.encode() in p.read_bytes()]
    ran = runner.temp.parent / "loot" / "ran"
    return " ".join([*held, *(ran.read_text().split() if ran.exists() else [])])


PASSED_ON = "".join(
    f"print({line!r}, file=env)\n"
    for line in (
        "BASH_ENV={loot}/script",
        "ENV={loot}/script",
        "SHELLOPTS=xtrace",
        "PS4=$({loot}/script)",
        "BASH_FUNC_printf%%=() {{ {loot}/script; }}",
        "PYTHONPATH={loot}/modules",
        "PYTHONHOME={loot}/modules",
        "PYTHONSTARTUP={loot}/script.py",
        "PYTHONINSPECT=1",
        "LD_PRELOAD={loot}/spy.so",
        "LD_LIBRARY_PATH={loot}",
        "LD_AUDIT={loot}/spy.so",
        "https_proxy={loot}",
        "HTTP_PROXY=http://127.0.0.1:9",
        "hTTp_pRoXy=http://127.0.0.1:9",
        "all_proxy=http://127.0.0.1:9",
        "SSL_CERT_FILE={loot}/ca.pem",
        "OPENSSL_CONF={loot}/openssl.cnf",
        "TMPDIR={loot}",
        "ROOFTRACE_TEMP={loot}",
        "ROOFTRACE_COMMENT={loot}/other.md",
        "ROOFTRACE_PULL=99",
        "ROOFTRACE_HEAD=fork:topic",
        "ROOFTRACE_SHA=beef",
        "ACTIONS_ALLOW_UNSECURE_COMMANDS=true",
        "GITHUB_API_URL=http://127.0.0.1:9",
        "CI_MERGE_REQUEST_IID=3",
    )
)
ATTACKS = {
    "environ of every ancestor": """
import re
pid = os.getpid()
while pid > 1:
    try:
        (loot / f"environ-{pid}").write_bytes(open(f"/proc/{pid}/environ", "rb").read())
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        break
""",
    "variables for the next step": """
program(loot / "script", "script")
(loot / "modules").mkdir()
(loot / "modules" / "sitecustomize.py").write_text(PYTHON_SPY)
env = open(os.environ["GITHUB_ENV"], "a")
"""
    + PASSED_ON.replace("{loot}", "' + str(loot) + '").replace("{{", "{").replace("}}", "}")
    + "env.close()",
    "programs in front of PATH": """
for name in "bash sh python python3 env cat rm git node".split():
    program(loot / "bin" / name, name)
print(loot / "bin", file=open(os.environ["GITHUB_PATH"], "a"))
""",
    "files of the action": """
for file in (release / "rooftrace/reporting/gates/posting.py", *action.iterdir()):
    file.write_text(PYTHON_SPY if file.suffix == ".py" else spy(file.name))
""",
    "modules beside the comment": """
for folder in (temp, action, release, pathlib.Path.cwd(), release / "rooftrace"):
    for name in "rooftrace json urllib stat hashlib tempfile sitecustomize pathlib ssl".split():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(PYTHON_SPY)
        (folder / (name + ".py")).write_text(PYTHON_SPY)
    (folder / "pyvenv.cfg").write_text("home = " + str(loot))
    (folder / "pyproject.toml").write_text("[tool.rooftrace]\\nrules = ['rooftrace.py']")
""",
    "another pull request": """
event = pathlib.Path(os.environ["GITHUB_EVENT_PATH"])
event.write_text('{"pull_request": {"number": 99}}')
print("comment-file=" + str(loot / "other.md"), file=open(os.environ["GITHUB_OUTPUT"], "a"))
(loot / "other.md").write_text(text.replace("from the check", "from elsewhere"))
""",
}


@POSIX
@pytest.mark.parametrize("name", ATTACKS)
def test_code_of_a_pull_request_gets_no_token_and_runs_in_no_later_step(
    runner: Runner, server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loot = runner.temp.parent / "loot"
    spy = f"PYTHON_SPY = {PYTHON_SPY.format(loot=str(loot), name=name.split()[0])!r}\n"
    runner.job = {"GITHUB_TOKEN": TOKEN, "GH_TOKEN": TOKEN}  # as some workflows have it
    code = runner.run(python=check_with(runner, spy + ATTACKS[name]))
    assert looted(runner) == "", runner.outcomes
    for file in ("ENV-0", "PATH-0"):
        assert (runner.temp / file).read_text() == "", "what a later step of the job would get"
    told = {step: (code, out) for step, code, out in runner.outcomes}
    assert code == 0 and told["check"][0] == 0, told
    if name == "files of the action":
        assert not server.comments and "no longer the file of this action" in told["post"][1]
        return
    assert told["post"] == (0, "commented on pull request 12\n"), told
    assert [urlsplit(path).path for method, path, _ in server.requests if method == "POST"] == [
        "/repos/owner/models/issues/12/comments"
    ]
    assert [c["body"] for c in server.comments] == [
        f"{reports.MARKER}\n### Costs\nfrom the check\n"
    ]


@POSIX
def test_variables_that_get_through_do_not_act_either(runner: Runner, server: Server) -> None:
    """A process that stays behind can write into the runner's files after the check is over."""
    loot = runner.temp.parent / "loot"
    spy = f"PYTHON_SPY = {PYTHON_SPY.format(loot=str(loot), name='late')!r}\n"
    wait = "os.environ['GITHUB_ENV'] = os.environ['GITHUB_PATH'] = str(loot / 'late')\n"
    attacks = [ATTACKS["variables for the next step"], ATTACKS["programs in front of PATH"]]
    for attack in attacks:
        python = check_with(runner, spy + wait + attack)
        script = runner.action / "action.sh"
        script.write_text(
            script.read_text().replace('exit "$verdict"', f'cat {loot}/late >"$FILE"')
        )
        file = "$GITHUB_ENV" if "env.close" in attack else "$GITHUB_PATH"
        script.write_text(script.read_text().replace("$FILE", file))
        assert runner.run(python=python) == 0
        assert (runner.temp / "ENV-0").read_text() or (runner.temp / "PATH-0").read_text()
        assert looted(runner) == "", runner.outcomes
        done = "renewed the comment" if runner.outcomes[2:] else "commented"
        assert runner.outcomes[-1] == ("post", 0, f"{done} on pull request 12\n")
        shutil.rmtree(loot)
        shutil.copy(Path(__file__).parents[2] / ACTION / "action.sh", script)


@POSIX
@pytest.mark.slow
def test_a_whole_check_gives_its_models_no_token(
    runner: Runner, server: Server, root: Path, tmp_path: Path
) -> None:
    """Once with rooftrace itself: models.py looks for the token while it is traced."""
    repository(runner.workspace, SETTINGS.replace('cnn = "models.py:cnn"\n', ""))
    runner.job = {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "GITHUB_TOKEN": TOKEN}
    lock = [sys.executable, "-m", "rooftrace", "lock"]
    subprocess.run(lock, cwd=runner.workspace, env=os.environ | runner.job, check=True)
    loot = tmp_path / "loot"
    loot.mkdir()
    setup = f"import os, pathlib\nloot = pathlib.Path({str(loot)!r})\n"
    attack = setup + ATTACKS["environ of every ancestor"]
    models = runner.workspace / "models.py"
    models.write_text(attack + MODELS.replace("self.up(self.norm(x))", CASTS))
    assert runner.run(python=sys.executable) == 1
    assert looted(runner) == "" and len(list(loot.iterdir())) >= 2, runner.outcomes
    (comment,) = server.comments
    assert "budgets exceeded" in comment["body"] and "❌" in comment["body"]


COMMENTS = {
    "a link": "os.unlink(out); os.symlink(loot / 'private', out)",
    "a second name": "os.unlink(out); os.link(loot / 'private', out)",
    "a folder": "os.unlink(out); os.mkdir(out)",
    "a large file": "open(out, 'a').write('x' * 262144)",
    "a comment of another": "open(out, 'w').write('<!-- other bot -->\\nLGTM')",
}


@POSIX
@pytest.mark.parametrize("name", COMMENTS)
def test_only_a_plain_comment_is_posted(runner: Runner, server: Server, name: str) -> None:
    private = f"(loot / 'private').write_text('{reports.MARKER}\\nprivate')\n"
    runner.run(python=check_with(runner, private + COMMENTS[name]))
    step, code, out = runner.outcomes[-1]
    assert ((step, code) == ("post", 2) and "expected" in out) or "symbolic" in out, out
    assert not server.comments and not server.requests
    assert "Traceback" not in out


@POSIX
def test_a_pipe_in_the_place_of_a_comment_is_not_waited_for(
    runner: Runner, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.run(python=check_with(runner, "os.unlink(out); os.mkfifo(out)")) == 2
    (comment,) = server.comments
    assert "could not run" in comment["body"]
    os.mkfifo(tmp_path / "pipe")
    assert posting.main([str(tmp_path / "pipe")], {}) == 2
    assert "expected a plain file" in capsys.readouterr().err


@POSIX
@pytest.mark.parametrize("code", [1, 2])
def test_a_check_that_fails_is_posted_and_fails(runner: Runner, server: Server, code: int) -> None:
    attack = "os.unlink(out)" if code == 2 else ""
    assert runner.run(python=check_with(runner, attack, code)) == code
    assert [step for step, *_ in runner.outcomes] == ["check", "post"]
    (comment,) = server.comments
    assert ("could not run" in comment["body"]) == (code == 2)


@POSIX
def test_a_comment_is_posted_from_another_job(runner: Runner, server: Server) -> None:
    """The job of `workflow_run` has the comment of a stranger and knows the request by its head."""
    comment = runner.workspace / "rooftrace-comment.md"
    comment.write_text(f"{reports.MARKER}\n### Costs\nfrom a fork\n")
    event = "github.event.workflow_run."
    runner.github = {
        "github.token": TOKEN,
        f"{event}head_repository.owner.login": "fork",
        f"{event}head_branch": "topic",
        f"{event}head_sha": "c0ffee",
    }
    assert runner.run(comment_file="rooftrace-comment.md", python="/bin/false") == 0
    assert [out for _, _, out in runner.outcomes] == ["commented on pull request 12\n"]
    runner.github[f"{event}head_sha"] = "deadbeef"  # the branch has moved on
    runner.outcomes.clear()
    assert runner.run(comment_file="rooftrace-comment.md") == 0
    assert "no comment" in runner.outcomes[0][2] and len(server.comments) == 1


@POSIX
def test_no_comment_where_none_is_wanted(runner: Runner, server: Server) -> None:
    assert runner.run(python=check_with(runner, ""), comment="false") == 0
    ((step, code, out),) = runner.outcomes
    assert (step, code) == ("check", 0) and "from the check" in out and not server.requests


# -- the files -------------------------------------------------------------------------------------


def test_the_action_runs_the_posting_script_of_its_release(root: Path) -> None:
    digest = hashlib.sha256((root / POSTING).read_bytes())
    assert f'"{digest.hexdigest()}"' in (root / ACTION / "action.yml").read_text(), (
        f"posting.py has changed: write its digest into action.yml, {digest.hexdigest()}"
    )
    assert posting._MARKER == reports.MARKER


def test_the_action_evaluates_no_text_of_a_pull_request(root: Path) -> None:
    """`${{ }}` stands in `env`, `if` and defaults; a script reads the environment."""
    steps = yaml.safe_load((root / ACTION / "action.yml").read_text())["runs"]["steps"]
    assert [step["id"] for step in steps] == ["check", "post"]
    assert all("${{" not in step["run"] + step["shell"] for step in steps)
    tokens = [n for n, step in enumerate(steps) for text in step["env"].values() if "token" in text]
    assert tokens == [1]
    script = (root / ACTION / "action.sh").read_text()
    assert "${{" not in script and "eval" not in script
    assert f"'{reports.MARKER}'" in script  # of the comment that it writes where no check ran
    for name in re.findall(r"\$\{?(ROOFTRACE_\w+)", script):
        assert name in steps[0]["env"], f"{name} is not set by action.yml"
    assert stat.S_ISREG(os.stat(root / ".pre-commit-hooks.yaml").st_mode)
