"""Attackers on what lies around a command: its cache, links, pipes, other users, the environment.

The judge is the same command in an undisturbed place: it gives the same numbers, and no file
outside of its own folders is another one afterwards.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.reporting.commands.fleet_sweeps import FleetSource
from rooftrace.tracer.phases.sizing import TraceCache
from tests.fuzz.watch import unasked, watching

PACKAGE = Path(rt.__file__).parents[1]
CONFIG = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32}
SECRET = b'{"secret": 1}'
OTHER = 65_534
"""A user that this one is not."""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links and pipes of POSIX")


class Mine:
    """A pickle that would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A model that is traced in a moment, in a folder with its name."""
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**CONFIG, "n_positions": 16}))
    return path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user's that nobody names."""
    path = tmp_path / "private" / "secret.json"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


def swept(config: Path) -> list[float]:
    return list(rt.sweep(str(config), over={"batch": [1, 3]}, seq=4).frame()["t_est"])


Attack = Callable[[Path, Path, random.Random], None]
"""What is done to a file of a cache, beside a secret."""


def cut(file: Path, secret: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])


def flip(file: Path, secret: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 9)):
        content[rng.randrange(len(content))] = rng.choice(b'0123456789[]{},"')
    file.write_bytes(content)


def deep(file: Path, secret: Path, rng: random.Random) -> None:
    file.write_bytes(b"[" * 100_000)


def nothing(file: Path, secret: Path, rng: random.Random) -> None:
    file.write_bytes(b"")


def other_json(file: Path, secret: Path, rng: random.Random) -> None:
    endless = '{"digests": {"/dev/zero": "a"}, "sources": ["/dev/zero"]}'
    file.write_text(rng.choice(["{}", "[]", "null", '{"x": 1}', '{"digests": 3}', endless, "3"]))


def a_pickle(file: Path, secret: Path, rng: random.Random) -> None:
    file.write_bytes(pickle.dumps(Mine(secret.with_name("ran"))))


def another(file: Path, secret: Path, rng: random.Random) -> None:
    for suffix in (".json", ".files"):  # a trace that holds, of something else
        source = rng.choice(sorted(file.parent.glob(f"*{suffix}")))
        shutil.copyfile(source, secret.with_name("copy"))
        file.with_suffix(suffix).write_bytes(secret.with_name("copy").read_bytes())
    secret.with_name("copy").unlink()


def another_half(file: Path, secret: Path, rng: random.Random) -> None:
    source = rng.choice(sorted(file.parent.glob(f"*{file.suffix}")))
    file.write_bytes(source.read_bytes())


def pairs_swapped(file: Path, secret: Path, rng: random.Random) -> None:
    traces = {p.with_suffix("") for p in file.parent.glob("*.files")}
    plans = {p.with_suffix("") for p in file.parent.glob("*.json")} - traces
    chosen = traces if file.with_suffix("") in traces or len(plans) < 2 else plans
    first, second = rng.sample(sorted(chosen), 2)
    for suffix in (".json", ".files") if chosen is traces else (".json",):
        aside = secret.with_name("aside")
        os.replace(first.with_suffix(suffix), aside)
        os.replace(second.with_suffix(suffix), first.with_suffix(suffix))
        os.replace(aside, second.with_suffix(suffix))


def a_folder(file: Path, secret: Path, rng: random.Random) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)


def a_link(target: str) -> Attack:
    def attack(file: Path, secret: Path, rng: random.Random) -> None:
        file.unlink()
        file.symlink_to({"secret": secret, "itself": file}.get(target, Path(target)))

    return attack


def a_pipe(file: Path, secret: Path, rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def no_rights(file: Path, secret: Path, rng: random.Random) -> None:
    file.chmod(0)


ATTACKS: dict[str, Attack] = {
    **{attack.__name__: attack for attack in (cut, flip, deep, nothing, other_json, a_pickle)},
    **{a.__name__: a for a in (another, another_half, pairs_swapped, a_folder, no_rights)},
    "a link to a file of the user": a_link("secret"),
    "a link to itself": a_link("itself"),
    "a link to nothing": a_link("/nonexistent/x"),
}


@pytest.mark.slow
def test_a_damaged_cache_changes_no_number_and_no_other_file(
    config: Path, secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuzz_seconds: float
) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setenv("ROOFTRACE_CACHE", str(kept))
    expected = swept(config)
    assert list(kept.glob("*.json")), "nothing was kept"
    good = shutil.copytree(kept, tmp_path / "good")
    rng, end = random.Random(0), time.monotonic() + fuzz_seconds
    for name in attacks(rng, end):
        shutil.rmtree(kept)
        shutil.copytree(good, kept)
        file = rng.choice(sorted(kept.iterdir()))
        ATTACKS[name](file, secret, rng)
        with watching() as seen:
            assert swept(config) == expected, name
        assert not unasked(seen, (), str(kept)), name
        assert secret.read_bytes() == SECRET, name
        assert os.listdir(secret.parent) == [secret.name], name


def attacks(rng: random.Random, end: float) -> Iterator[str]:
    """Each kind once, then any of them until the time is over."""
    yield from ATTACKS
    while time.monotonic() < end:
        yield rng.choice(list(ATTACKS))


def poison(kept: Path) -> None:
    """Put one trace in the place of all others, with files that say that it holds."""
    content = max((path.read_bytes() for path in kept.glob("*.json")), key=len)
    for path in kept.glob("*.json"):
        path.write_bytes(content)
        digests = {str(path): hashlib.sha256(content).hexdigest()}
        record = {"digests": digests, "sources": []}
        path.with_suffix(".files").write_text(json.dumps(record))


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["open to all", "another user's"])
def test_a_trace_that_another_user_could_write_is_not_read(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setenv("ROOFTRACE_CACHE", str(kept))
    expected = swept(config)
    if whose == "open to all":
        kept.chmod(0o1777)
    elif os.geteuid() == 0:
        os.chown(kept, OTHER, OTHER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    poison(kept)
    before = {path: path.read_bytes() for path in kept.iterdir()}
    assert swept(config) == expected
    assert {path: path.read_bytes() for path in kept.iterdir()} == before  # nothing is put there


PIPES = (
    *("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "adapter.json"),
    *("hf_quant_config.json", "quantize_config.json", "generation_config.json", "tokenizer.json"),
    *("code.py", "x.gguf", "preprocessor_config.json", "special_tokens_map.json", "chat.jinja"),
)


@pytest.mark.parametrize("kind", ["pipe", "device", "link to itself", "link to nothing"])
def test_what_is_no_file_beside_a_config_is_left_alone(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("ROOFTRACE_CACHE", str(tmp_path / "kept"))
    for name in PIPES:
        path = config.with_name(name)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            target = {"device": "/dev/zero", "link to itself": path}.get(kind, "/nonexistent/x")
            path.symlink_to(target)
    # Opening a pipe to which nobody writes would wait for ever, and a device has no end.
    with limited(20):
        assert len(swept(config)) == 2
        assert FleetSource.of(config.parent).digest


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Fails after so long, instead of waiting for ever."""

    def late(*_: Any) -> None:
        raise AssertionError(f"not done within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_packages_in_a_circle_are_read_once(tmp_path: Path) -> None:
    for number in range(3):
        package = tmp_path / f"p{number}"
        package.mkdir()
        (package / "__init__.py").write_text("x = 1\n")
        for other in range(3):
            (package / f"p{other}").symlink_to(tmp_path / f"p{other}")
    (tmp_path / "model.py").write_text("def build():\n    pass\n")
    with limited(20):
        assert FleetSource.of(f"{tmp_path}/model.py:build").digest


ENVIRONMENTS = (
    *({"ROOFTRACE_CACHE": value} for value in ("/dev/null", "/proc/self", "off")),
    *({"XDG_CACHE_HOME": value} for value in (".", "/dev/null", "a\udcff", "")),
    *({"HOME": value} for value in ("", "relative", "/dev/null", "\udcff")),
    *({"TMPDIR": value} for value in ("{gone}", "/dev/null", "\udcff")),
    *({"ROOFTRACE_CACHE": value} for value in ("{gone}", "{gone}/a\nb", "{gone}/\udcff")),
    *({"COLUMNS": value} for value in ("x", "-1", "0", "999999999")),
    *({"TERM": "\x1b[2J"}, {"PYTHONIOENCODING": "ascii"}, {"TZ": "x"}, {"SOURCE_DATE_EPOCH": "x"}),
    *({"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "x"}),
    *({"RANK": "x", "WORLD_SIZE": "-1"}, {"CUDA_VISIBLE_DEVICES": "\x1b"}, {"MPLBACKEND": "x"}),
    *({"HF_HOME": "/dev/null"}, {"MPLCONFIGDIR": "/dev/null"}, {"PAGER": "x", "EDITOR": "x"}),
    *({"HF_TOKEN": "x\n"}, {"NO_COLOR": "", "CLICOLOR": "x"}, {"OMP_NUM_THREADS": "x"}),
)
"""Variables that a shell, a container or a mistake leaves."""


def said(environment: Mapping[str, str], here: Path, *words: str) -> bytes:
    """What the installed command says in an environment, with files of any name in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", "from rooftrace.reporting.cli import run; run()", *words],
        cwd=here, env={**os.environ, "PYTHONPATH": str(PACKAGE), "COLUMNS": "100", **environment},
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (environment, done.stderr[-500:])
    assert b"Traceback" not in done.stderr and b"\x1b" not in done.stderr, environment
    return done.stdout


@pytest.mark.slow
@pytest.mark.subprocess
def test_no_environment_changes_a_number(config: Path, tmp_path: Path, fuzz_seconds: float) -> None:
    form = config.with_name("a\udcffé.form.json")
    rt.tools.form(str(config), over={"batch": [1, 2, 3]}, seq=4).save(form)
    table = str(config.with_name("table.csv"))
    words = ("sweep", str(form), "--over", "batch=1..3", "--format", "csv", "-o", table)
    expected = said({}, tmp_path, *words)
    rng, end = random.Random(0), time.monotonic() + fuzz_seconds
    chosen = [*rng.sample(ENVIRONMENTS, k=6), {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}]
    while chosen:
        environment = chosen.pop()
        gone = str(config.with_name("gone"))
        environment = {name: text.format(gone=gone) for name, text in environment.items()}
        assert said(environment, tmp_path, *words) == expected, environment
        left = [path.name for path in tmp_path.iterdir() if path.name != config.parent.name]
        assert not left, (environment, left)
        if not chosen and time.monotonic() < end:
            chosen = [{**rng.choice(ENVIRONMENTS), **rng.choice(ENVIRONMENTS)}]


def test_a_home_that_nobody_has_is_no_folder_of_the_working_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROOFTRACE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a name
    monkeypatch.chdir(tmp_path)
    assert TraceCache.usual().private() is None
    monkeypatch.setenv("XDG_CACHE_HOME", ".")  # which a clone could fill
    assert TraceCache.usual().private() is None
    assert not list(tmp_path.iterdir())


TOKENS = {
    "HF_TOKEN": "hf_SECRET1", "GITHUB_TOKEN": "ghp_SECRET2", "AWS_SECRET_ACCESS_KEY": "SECRET3",
    "WANDB_API_KEY": "SECRET4", "HTTPS_PROXY": "http://me:SECRET5@proxy:1", "USER": "SECRETUSER",
}  # fmt: skip
EVERY = "html,md,json,csv,svg,tex,trace,chakra"


@pytest.mark.slow
@pytest.mark.subprocess
def test_no_output_holds_a_token_a_user_or_a_path_that_was_not_named(tmp_path: Path) -> None:
    project = tmp_path / "SECRETHOME" / "project"
    project.mkdir(parents=True)
    (project / "model.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Linear(8, 8)\n"
    )
    for words in (
        ("init", "-q"), ("remote", "add", "origin", "https://me:SECRET6@github.com/x/y.git"),
        ("add", "-A"), ("-c", "user.name=a", "-c", "user.email=SECRET7@x", "commit", "-qm", "x"),
    ):  # fmt: skip
        subprocess.run(["git", *words], cwd=project, check=True)
    target = ("model.py:build", "--input", "input=2,8:fp32")
    environment = {**TOKENS, "HOME": str(tmp_path / "SECRETHOME"), "ROOFTRACE_CACHE": "off"}
    made = []
    for command in (
        ("report", *target, "--format", EVERY, "--out", "report"),
        ("trace", *target, "-o", "graph.json"),
        ("lock", *target, "-o", "new.lock"),
        ("sweep", *target, "--over", "batch=1..2", "--save-form", "form.json", "-o", "table.csv"),
        ("diff", *target, "--git", "HEAD", "--format", "html", "-o", "diff.html"),
    ):
        made.append(said(environment, project, *command))
    made += [p.read_bytes() for p in project.rglob("*") if p.is_file() and ".git" not in p.parts]
    assert len(made) > 20
    for content in made:
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        assert b"SECRET" not in text, text[max(text.find(b"SECRET") - 100, 0) :][:200]
