"""Attackers on files: whatever a data file says, no code runs that the command line did not name.

`pytest tests/fuzz --fuzz-seconds=600` tries longer; the seed is fixed, so more time tries the same
attacks and then others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rooftrace._escapes import to_toml
from rooftrace.errors import RequestError
from rooftrace.measured.alignment.pairing import template_of
from tests.fuzz.watch import unasked, watching
from tests.reporting.conftest import Run, run

pytestmark = pytest.mark.quick

__all__ = ["run"]

CORPUS = Path(__file__).parents[1] / "corpus"
PAYLOAD = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
EVIL = ("payload", "antigravity", "this", "turtledemo", "webbrowser")
NAMES = (
    "payload:build",
    "payload.py:build",
    "./payload.py:build",
    "antigravity:fly",
    "this:s",
    "os:abort",
    "os:_exit",
    "hf:payload/payload",
    "hf:.",
    "config.json",
    ".",
    "{target}",
    "{target.__class__.__init__.__globals__}",
    "{batch:>2000000000}",
    "payload:build\n",
    "payload:build\x00",
    "\udcff",
    "=cmd|' /C calc'!A0",
    "",
)
TEMPLATES = (
    "payload.py:{target}",
    "{target}.py:x",
    "configs/{target}.json",
    "hf:{target}",
    "m{seq}",
)


@pytest.fixture
def seconds(fuzz_seconds: float) -> float:
    """How long each of the attackers here tries: they share the time of the file."""
    return fuzz_seconds / 6


def attacks(seconds: float) -> Iterator[random.Random]:
    """Seeded generators: at least three, then until the time has passed."""
    end = time.monotonic() + seconds
    for seed in itertools.count():
        if seed >= 3 and time.monotonic() > end:
            return
        yield random.Random(seed)


def a_table(rng: random.Random) -> str:
    columns = ["model", "batch", "ms", *rng.sample(["phase", "dtype", "execution", "chip"], 2)]
    rows = []
    for _ in range(rng.randint(1, 3)):
        cells = [rng.choice(NAMES), str(rng.randint(1, 9)), "1.5"]
        cells += [rng.choice((*NAMES, "forward", "fp32")) for _ in columns[3:]]
        rows.append(",".join('"' + cell.replace('"', '""') + '"' for cell in cells))
    return "\n".join([",".join(columns), *rows, ""])


def a_run(rng: random.Random) -> str:
    def row(number: int) -> dict[str, Any]:
        sizes = {n: rng.choice((1, 8, *NAMES)) for n in rng.sample(["batch", "seq", "kv"], 2)}
        return {
            "key": f"{number} {rng.choice(NAMES)}",
            "model": rng.choice(NAMES),
            "phase": rng.choice(("forward", *NAMES)),
            "mode": "eager",
            "sizes": sizes,
            "seconds": [0.5],
            "scale": rng.choice(("", "", "tiny", *NAMES)),
            "dtype": rng.choice(("fp32", *NAMES)),
        }

    rows = [row(number) for number in range(rng.randint(1, 3))]
    made = {"schema": "rooftrace.run/1", "versions": {}, "micro": [], "troubles": []}
    device = {"name": rng.choice(NAMES), "type": rng.choice(("cpu", "cuda", *NAMES))}
    return json.dumps({**made, "device": device, "models": rows})


def a_config(rng: random.Random) -> str:
    small = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "hidden_size": 8}
    names = (*NAMES, "someone/kernel", "flash_attention_2", "pipeline", None, 1, {"": "a/b"})
    fields = (
        "_attn_implementation",
        "attn_implementation",
        "_experts_implementation",
        "architectures",
        "auto_map",
        "backbone",
        "architecture",
        "dtype",
        "torch_dtype",
        "quantization_config",
        "text_config",
        "hidden_act",
        "tokenizer_class",
    )

    def part(depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"model_type": rng.choice(("gpt2", "bert", "llava", "payload"))}
        for field in rng.sample(fields, 3):
            value: Any = rng.choice(names)
            made[field] = rng.choice((value, [value], {"payload": value}))
        if depth:
            made["text_config"] = part(depth - 1)
        return {**small, **made}

    return json.dumps(part(rng.randint(0, 2)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Path:
    """Where the user is: with a file of code that nobody asks for."""
    monkeypatch.chdir(tmp_path)
    # The standard error that transformers found first in this process may be closed by now, which
    # logging complains of; a command has a process of its own.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    (tmp_path / "payload.py").write_text(PAYLOAD)
    return tmp_path


def attack(folder: Path, run: Run, *arguments: str | Path) -> None:
    """Run a command under watch: it ends with a message, and nothing that data named has run."""
    with watching() as seen:
        ran = run(*arguments)
    assert ran.code in (0, 1, 2) and "Traceback" not in ran.err
    assert not unasked(seen, EVIL, str(folder)) and not (folder / "ran").exists()


def poisoned(value: Any, rng: random.Random) -> Any:
    """The value with some of its texts replaced by hostile names, keys of tables too."""
    if isinstance(value, dict):
        return {
            (rng.choice(NAMES) if rng.random() < 0.02 else key): poisoned(item, rng)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [poisoned(item, rng) for item in value]
    return rng.choice(NAMES) if isinstance(value, str) and rng.random() < 0.2 else value


def toml(value: str, rng: random.Random) -> str:
    """A TOML text with some of its strings replaced by hostile names."""

    def other(text: re.Match[str]) -> str:
        return to_toml(rng.choice(NAMES)) if rng.random() < 0.2 else text[0]

    return re.sub(r'"[^"\n]*"', other, value)


def a_trace() -> dict[str, Any]:
    facts = {"Input Dims": [[2, 8], [8, 8]], "Sequence number": 1, "Call stack": "payload.py(1): f"}
    ops = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": n, "dur": 0.5}
        for n in range(3)
    ]
    return {"schemaVersion": 1, "traceEvents": [{**op, "args": facts} for op in ops]}


def test_other_files_run_nothing(folder: Path, run: Run, seconds: float, root: Path) -> None:
    """Graphs, traces, knobs and chips: an error of any kind is the matter of other tests."""
    (folder / "model.py").write_text(
        "import torch\ndef build(): return torch.nn.Linear(8, 8), torch.empty(2, 8)\n"
    )
    assert run("trace", "model.py:build", "--phase", "forward", "-o", "graph.json").code == 0
    graph = json.loads((folder / "graph.json").read_text())
    knobs = (root / "rooftrace/costmodels/kernels/fitted/typical-eager.toml").read_text()
    chip = (root / "rooftrace/hardware/chips/l4.toml").read_text()
    for rng in attacks(seconds):
        files = {
            "bad.json": json.dumps(poisoned(graph, rng)),
            "trace.json": json.dumps(poisoned(a_trace(), rng)),
            "knobs.toml": toml(knobs, rng),
            "chip.toml": toml(chip, rng),
        }
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        command = rng.choice(
            (
                ("report", "bad.json", "--chip", "l4"),
                ("diff", "bad.json", "graph.json", "--chip", "l4"),
                ("report", "graph.json", "--chip", "l4", "--knobs", "knobs.toml"),
                ("report", "graph.json", "--chip", "chip.toml"),
                ("chips", "lint", "chip.toml"),
                ("validate", "trace.json", "--chip", "l4", "--target", "graph.json"),
            )
        )
        with watching() as seen, contextlib.suppress(Exception):
            run(*command)
        assert not unasked(seen, EVIL, f"{folder}/payload") and not (folder / "ran").exists()


MEASURED = sorted((CORPUS / "targets").iterdir())
CONFIGS = sorted((CORPUS / "configs").iterdir())


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_known_measurements_run_nothing(path: Path, folder: Path, run: Run) -> None:
    for command in (("validate", path), ("calibrate", path, "-o", "-")):
        attack(folder, run, *command, "--chip", "l4")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_known_configs_run_nothing(path: Path, folder: Path, run: Run) -> None:
    pytest.importorskip("transformers")
    sizes = ("--batch", "1", "--seq", "4", "--phase", "forward")
    attack(folder, run, "trace", path, *sizes, "-o", "-")


def test_measurements_run_nothing(folder: Path, run: Run, seconds: float) -> None:
    for rng in attacks(seconds):
        make, name = rng.choice(((a_table, "steps.csv"), (a_run, "run.json")))
        (folder / name).write_text(make(rng), encoding="utf-8", errors="surrogateescape")
        template = ("--target", rng.choice(TEMPLATES[1:])) if rng.random() < 0.3 else ()
        attack(folder, run, "validate", name, "--chip", "l4", *template)


def test_configs_run_nothing(folder: Path, run: Run, seconds: float) -> None:
    pytest.importorskip("transformers")
    for rng in attacks(seconds):
        (folder / "config.json").write_text(a_config(rng))
        sizes = ("--batch", "1", "--seq", "4", "--phase", "forward")
        attack(folder, run, "trace", "config.json", *sizes, "-o", "-")


def test_a_template_never_leads_out_of_what_it_names(seconds: float) -> None:
    letters = "ab.:/\\{}_-[]!0 \n\x00é~%$"
    for rng in itertools.islice(attacks(seconds / 4), 20_000):
        name = rng.choice((*NAMES, "".join(rng.choices(letters, k=rng.randint(0, 12)))))
        for text in TEMPLATES[:4]:
            try:
                made = template_of(text).filled({"target": name})
            except RequestError:
                continue
            before, after = text.split("{target}")
            put = made.removeprefix(before).removesuffix(after)
            assert put == name and ":" not in put and ".." not in put.split("/") and put.isascii()
            assert not put.startswith(("/", "__") if ":" in text[3:] else "/")
        odd = "".join(rng.choices(letters, k=8))
        try:
            assert template_of(odd).filled({"target": "x"})
        except RequestError:
            continue
