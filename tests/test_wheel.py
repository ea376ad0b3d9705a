"""From a clean copy of the checkout: sdist, wheel from that sdist, fresh environment, import."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

ROOT = Path(__file__).resolve().parents[1]
LINKS = {"tracer", "costmodels", "hardware", "reporting"}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command to its end and return what it printed; everything it said, if it failed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def clean_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone of this working tree would hold: nothing that git ignores, links as links."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("clone")
    listing = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listing.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_symlink() or source.is_file():  # neither: deleted, and not committed yet
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    assert all((copy / link).is_symlink() for link in LINKS)
    return copy


@pytest.fixture(scope="module")
def built(clean_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it (not from the checkout)."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=clean_copy)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_the_sdist_has_no_links_and_the_wheel_one_top_level_name_with_all_that_is_read(
    built: tuple[Path, Path], clean_copy: Path
) -> None:
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert LINKS.isdisjoint(member.name.split("/")[1] for member in members if "/" in member.name)

    with zipfile.ZipFile(built[1]) as packed:
        names = set(packed.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rooftrace"}

    package = clean_copy / "rooftrace"
    files = {
        path.relative_to(clean_copy).as_posix() for path in package.rglob("*") if path.is_file()
    }
    assert {name for name in files if "/chips/" in name}, "no chip file in the checkout"
    assert {name for name in names if name.startswith("rooftrace/")} == files


@pytest.fixture(scope="module")
def fresh(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("venv") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "--quiet"]
    run(*pip, "install", "--no-deps", "--no-index", built[1], cwd=folder.parent)
    return scripts


# The libraries are those of this environment. Through PYTHONPATH no .pth file is read, so an
# editable install of the checkout cannot stand in for the wheel.
LIBRARIES = os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def test_the_wheel_works_in_a_fresh_environment(fresh: Path, tmp_path: Path) -> None:
    code = (
        "import rooftrace, rooftrace.hardware, rooftrace.tracer, rooftrace.costmodels,"
        " rooftrace.reporting\n"
        "import importlib.util\n"
        f"assert not any(map(importlib.util.find_spec, {sorted(LINKS)}))\n"
        "print(rooftrace.__file__)"
    )
    where = run(fresh / "python", "-c", code, cwd=tmp_path, PYTHONPATH=LIBRARIES)
    assert Path(where.strip()).is_relative_to(fresh.parent)
    assert "report" in run(fresh / "rooftrace", "--help", cwd=tmp_path, PYTHONPATH=LIBRARIES)


BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = """
import csv, torch, rooftrace as rt
from model import build

model, inputs = build()
model.eval()  # what --phase forward is: with dropout half of the time was in no op of the graph
rt.measure(model, *inputs, phase="forward", budget_s=1.0).save("run.json.gz")
with torch.profiler.profile(record_shapes=True) as profile:
    for _ in range(3):
        with torch.profiler.record_function("ProfilerStep#0"), torch.no_grad():
            model(*inputs)
profile.export_chrome_trace("trace.json.gz")
with open("models.py", "w") as file:
    file.write("from model import *\\nsmall = wide = deep = long = build\\n")
open("pyproject.toml", "w").close()  # a lock belongs to a project
with open("steps.csv", "w") as file:
    file.write("model,batch,ms\\nsmall,16,1.5\\nwide,16,1.6\\ndeep,16,1.4\\nlong,16,1.55\\n")
with open("train.py", "w") as file:
    file.write('''
import os, torch
from model import build
model, (x,) = build()
model.cuda()
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    optimizer.zero_grad()
    model(x.cuda()).square().mean().backward()
    optimizer.step()
''')
"""
"""Files of a user: measured step times, a run of `rooftrace measure`, a profile and a script."""
COMMANDS = """
import json, sys
from rooftrace.measured.bench import measurement as targetruns
from rooftrace.reporting.commands import measurements
from rooftrace.reporting.cli import cli, main

# Of `calibrate --run`: longer says no more here.
targetruns._SECONDS, measurements._CHIP_SECONDS = 0.5, 0.5

for _, name, *words in json.loads(sys.argv[1]):
    if "llama-3.1-70b" in words or name in ("solve", "sweep"):
        print(cli.commands[name].make_context(name, words).params)
    else:
        main([name, *words])  # exits where a command fails
    print("end of a command", flush=True)
"""
"""Every command of the page, by its words, in one process: each alone would import torch.

Those on a model of 70 billion parameters, sweeps and searches take half a minute each: only their
options are read here, and pages of docs/ run such sweeps, searches and meshes on smaller models.
"""


@pytest.mark.long
def test_every_block_of_the_readme_runs_from_the_wheel(fresh: Path, tmp_path: Path) -> None:
    # A crash of the interpreter says where it was.
    variables = {"PYTHONPATH": LIBRARIES, "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
    code, commands = [], []
    for language, text in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        if text.startswith("# model.py\n"):
            (tmp_path / "model.py").write_text(text, encoding="utf-8")
        elif language == "python":
            code.append(text)
        elif language == "sh":
            commands += [line for line in text.splitlines() if line.startswith("rooftrace ")]
    assert len(commands) >= 10 and code
    assert all(" " in line and "/" not in line.split()[0] for line in commands)
    # Tests of calibration compile what they measure; here that would take a minute more.
    shorter = [line.replace("--execution compiled", "--execution eager") for line in commands]
    words = [shlex.split(line, comments=True) for line in shorter]
    (tmp_path / "all.py").write_text("\n".join([FILES, *code, COMMANDS]), encoding="utf-8")
    shown = run(fresh / "python", "all.py", json.dumps(words), cwd=tmp_path, **variables)
    said = shown.split("end of a command\n")
    assert len(said) == len(words) + 1 and "Traceback" not in shown, shown[-2000:]
    assert all(text.strip() for text in said[:-1])
