"""Attackers on folders: a command gives in a planted folder what it gives in an empty one.

A clone or an archive may hold files of any name.  Commands run in one that has the modules that
they import, settings of libraries, and files that other tools look for, also in the folder above.
None of it is imported, opened or seen in a result, unless it is named.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.reporting.cli import cli

PACKAGE = Path(rt.__file__).parents[1]
CANARY = """
import pathlib
with open({canary!r}, "a") as file:
    file.write(__file__ + "\\n")
"""
MODULES = (
    *("torch", "numpy", "rooftrace", "matplotlib", "json", "rich", "click", "msgspec", "pandas"),
    *(
        "transformers",
        "timm",
        "onnx",
        "sitecustomize",
        "usercustomize",
        "conftest",
        "costs",
        "setup",
    ),
    *("multiprocessing", "subprocess", "tomllib", "readline", "evil", "typing_extensions", "PIL"),
)
SETTINGS = (
    *("backend: module://evil", "text.usetex: True", "font.size: 30", "axes.grid: True"),
    *(r"text.latex.preamble: \input{/etc/passwd}", "svg.fonttype: path", "savefig.dpi: 20"),
    *("figure.hooks: evil:run", "path.sketch: 1, 100, 2", "lines.linewidth: 9", "font.family: x"),
    *("axes.facecolor: red", "savefig.bbox: tight", "figure.autolayout: True", "\x1b[2J: 1", ":"),
)
FILES = {
    "pyproject.toml": "[tool.rooftrace]\ntargets = ['evil:x']\nrules = ['evil.py']\n",
    "costs.lock": "format = 'evil'\n",
    ".env": "ROOFTRACE_CACHE=evil\nPYTHONSTARTUP=evil.py\n",
    ".netrc": "machine huggingface.co login a password b\n",
    "knobs.toml": "title = 'evil'\n",
    "chips/h200-sxm.toml": "name = 'evil'\n",
    "h200-sxm.toml": "name = 'evil'\n",
    "gpt2.json": "{}",
    "config.json": "{}",
    ".rooftrace-x/place": "loot",
    ".rooftrace-x/old/loot": "loot",
    ".rooftrace-x/lock": "",
    ".git/config": "[core]\n\tfsmonitor = touch evil\n",
    "stylelib/evil.mplstyle": "font.size: 30\n",
    "dask.yaml": "distributed: {worker: {preload: [evil]}}\n",
    "setup.cfg": "[tool:pytest]\n",
    "torch/__init__.py": "",
}
COMMANDS = (
    "chips list",
    "chips show h200-sxm",
    "systems list",
    "trace {there}/config.json --phase decode -o {out}/graph.json",
    "report {there}/graph.json --format html,md,json,csv,png,svg,tex --out {out}/report",
    "sweep {there}/form.json --over batch=1..4 --plot {out}/sweep.svg -o {out}/sweep.csv",
    "explain {there}/config.json --phase prefill --seq 8 --plot {out}/explain.svg",
    "roofline {there}/graph.json --plot {out}/roofline.svg",
    "sensitivity {there}/config.json --phase prefill --over batch=2 --over seq=8",
    "solve {there}/config.json --phase decode --find batch",
    "report {there}/graph.json --table census --format json",
    "report {there}/graph.json --table nodes --format csv",
    "diff {there}/graph.json {there}/again.json",
    "inventory {there}/config.json",
    "solve {there}/config.json --find critical-batch --over devices=1 --over kv=8,16",
    "compare {there}/config.json --phase decode",
    "validate {there}/steps.csv --chip h100-sxm --target {there}/{{target}}.json",
    "calibrate {there}/steps.csv --chip h100-sxm --target {there}/{{target}}.json -o {out}/k.toml",
    "run {there}/train.py",
)
"""Of every command one that ends well here; `lock` and `check` read the files of a project."""
HERE_TOOK = re.compile(r"[\d.]+ \w?s here")
QUICK = ("chips", "trace", "report", "sweep", "roofline", "diff", "inventory")
"""Those that `make test` tries."""
DRIVER = """
import io, contextlib, json, os, sys
here, jobs = os.getcwd(), json.loads(sys.argv[-1])
above = os.path.dirname(here)
seen = []

def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path.startswith(above + os.sep) and os.path.lexists(path):
            seen.append(event + " " + os.path.relpath(path, above))

def run(words):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as stop:
            code = stop.code
    said = {"code": code or 0, "out": out.getvalue(), "err": err.getvalue(), "seen": seen[:]}
    seen.clear()
    print(json.dumps(said), flush=True)

if __name__ == "__main__":
    sys.addaudithook(note)
    from rooftrace.reporting.cli import main
    for words in jobs:
        run(words)
    os._exit(0)
"""
CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}
STEPS = "model,batch,seq,phase,dtype,execution,chip,ms\n" + "".join(
    f"config,{batch},8,prefill,bf16,eager,h100-sxm,{1.2 + batch / 20}\n" for batch in (1, 2, 4)
)
TRAIN = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands are asked about, and the program that runs them."""
    folder = tmp_path_factory.mktemp("there")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "n_positions": 64}))
    (folder / "steps.csv").write_text(STEPS)
    (folder / "train.py").write_text(TRAIN)
    (folder / "driver.py").write_text(DRIVER)
    config = str(folder / "config.json")
    for name in ("graph.json", "again.json"):
        rt.save(rt.trace(config, seq=8), folder / name)
    form = rt.tools.form(config, over={"batch": [1, 2, 3, 4]}, seq=8)
    form.save(folder / "form.json")
    return folder


def ran(words: list[str], there: Path, here: Path) -> tuple[list[Any], dict[str, bytes]]:
    """What commands say in a folder, one after the other, and the files that they write.

    They run as the installed command does: the working folder is not on the import path.
    """
    out = there / "out"
    shutil.rmtree(out, ignore_errors=True)
    jobs = [command.format(there=there, out=out).split() for command in words]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, str(there / "driver.py"), json.dumps(jobs)],
        cwd=here, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [(job, each["err"]) for job, each in zip(words, said, strict=True) if each["code"]]
    assert not failed
    files = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
    return said, files


def planted(folder: Path, rng: random.Random, canary: Path) -> None:
    """Fill a folder and the one above with modules and files that nobody asks for."""
    for place in (folder, folder.parent):
        for name in rng.sample(MODULES, k=len(MODULES) * 3 // 4):
            path = place / f"{name}.py"
            if rng.random() < 0.3:
                path = place / name / "__init__.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(CANARY.format(canary=str(canary)))
        for name, content in FILES.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        settings = rng.sample(SETTINGS, k=4)
        (place / "matplotlibrc").write_text("\n".join(settings) + "\n")


def test_every_command_is_tried() -> None:
    tried = {command.split()[0] for command in COMMANDS}
    assert tried | {"measure", "breaks", "check", "lock"} == set(cli.commands)


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_planted_folder_changes_nothing(there: Path, tmp_path: Path, fuzz_seconds: float) -> None:
    empty = tmp_path / "empty" / "below"
    empty.mkdir(parents=True)
    rng, end = random.Random(0), time.monotonic() + fuzz_seconds
    commands = [c for c in COMMANDS if fuzz_seconds > 5 or c.split()[0] in QUICK]
    wanted, files = ran(commands, there, empty)
    for number in itertools.count():
        here = tmp_path / str(number) / "below"
        here.mkdir(parents=True)
        planted(here, rng, tmp_path / "canary")
        before = sorted(here.parent.rglob("*"))
        said, made = ran(commands, there, here)
        assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
        for command, now, then in zip(commands, said, wanted, strict=True):
            assert set(now["seen"]) <= {"open below/matplotlibrc"}, command
            texts = [HERE_TOOK.sub("", each["out"]) for each in (now, then)]
            assert texts[0] == texts[1], command
        assert made.keys() == files.keys()
        assert [name for name in made if made[name] != files[name]] == []
        assert sorted(here.parent.rglob("*")) == before
        if time.monotonic() > end:
            return


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.skipif(sys.version_info < (3, 11), reason="no Python without its working folder")
def test_workers_of_a_fleet_import_nothing_from_the_working_folder(
    there: Path, tmp_path: Path
) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "multiprocessing.py").write_text(CANARY.format(canary=str(tmp_path / "canary")))
    (tmp_path / "one.json").write_bytes((there / "form.json").read_bytes())
    ran(
        [f"sweep {{there}}/form.json {tmp_path}/one.json --over batch=1..2 -o {{out}}"],
        there,
        tmp_path,
    )
    assert not (tmp_path / "canary").exists()
