"""`rooftrace run`: a script, unmodified, and what its steps cost."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import torch

import rooftrace as rt
from rooftrace.reporting.cli import cli
from tests.reporting.conftest import Run

SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda"
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(96, 64), torch.randint(10, (96,)))
print(torch.cuda.get_device_name(), sys.argv[1:])
began = time.perf_counter()
for epoch in range(3):
    for x, y in DataLoader(data, batch_size=16):
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        print(f"loss {loss.item():.2f} seconds {now - began:.9f}")
        began = now
with open("log.txt", "w") as log:
    log.write("done")
"""
WIDE, NARROW, BATCH = 64 * 256, 256 * 10, 16
FLOPS = 2 * BATCH * (3 * NARROW + 2 * WIDE)  # the input of the model needs no gradient
PARAMETERS = WIDE + 256 + NARROW + 10


@pytest.fixture
def here(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script in it; commands run there."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def matrix(cost: rt.types.TurnCost) -> int:
    return sum(step.flops_matrix * times for step, times in cost.parts)


def document(run: Run, *words: str) -> dict[str, Any]:
    ran = run("run", *words[:-1], "--format", "json", "--out", "run.json", words[-1])
    assert ran.code == 0, ran.err
    made: dict[str, Any] = json.loads(Path("run.json").read_text())
    return made


def test_a_step_of_a_script_has_the_flops_and_bytes_of_its_model(here: Path) -> None:
    cost = rt.run(["train.py"], chip="h100-sxm")
    steady = cost.steady
    assert steady is not None and cost.script.ended == "stopped"
    assert sum(row.turns for row in cost.rows) == 3
    assert matrix(steady) == FLOPS
    memory = steady.largest.memory
    assert memory.at_peak["weights"] == 4 * PARAMETERS
    assert memory.optimizer == 2 * 4 * PARAMETERS  # two moments; AdamW counts its steps on the host
    assert "h100" in repr(cost) and "train.py" in cost.title


ATTENTION = """
import torch
from torch import nn

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192, bias=False)

    def forward(self, x):
        q, k, v = self.project(x).view(2, 128, 3, 1, 64).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)

model = Heads().cuda().bfloat16()
x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
model(x).float().sum().backward()  # a pass before there is an optimizer
model.zero_grad()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    model(x).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_json_of_a_run_has_the_fields_of_a_report(here: Path, run: Run) -> None:
    (here / "heads.py").write_text(ATTENTION)
    made = document(run, "--chip", "h100-sxm", "heads.py")
    asked = "--chip", "h100-sxm", "--execution", "eager", "--out", "."
    assert run("report", "heads.py", *asked).code == 0
    report = json.loads((here / "report.json").read_text())
    step, memory = report["phases"]["training"]["eager"], report["memory"]["training"]
    warm, *_, row = made["turns"]
    assert step.keys() - {"chips"} <= row.keys()
    assert row["memory"].keys() <= memory.keys()
    for key in ("flops_matrix", "flops_recompute", "by_part", "by_family", "bytes", "t_est", "hfu"):
        assert row[key] == step[key], key
    assert row["memory"]["at_peak"] == memory["at_peak"]
    # Each pass has gradients of the weight, which no optimizer reads in the first.
    product = 2 * 2 * 128 * 64 * 192
    scores = 2 * 2 * 128 * 128 * 64
    assert [t["kind"] for t in made["turns"]] == ["training"] * len(made["turns"])
    assert sum(t["turns"] for t in made["turns"]) == 1 + 3
    for turn in (warm, row):
        assert turn["memory"]["gradients"] == 2 * 64 * 192
        assert turn["flops_matrix"] == 2 * product + 6 * scores
        # FlopCounterMode counts five products in the backward of a fused attention.
        assert turn["by_part"]["backward"]["flops_recompute"] >= scores
    page = run("run", "--chip", "h100-sxm", "heads.py").out
    assert f"{scores / 1e6:.2f} MFLOP here" in " ".join(page.split())


def notebook(path: Path, *cells: str) -> None:
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "# Net"}, *code]}))


def test_the_cells_of_a_notebook_are_a_script(here: Path, run: Run) -> None:
    head, _, loop = SCRIPT.partition("began = ")
    head = f"%matplotlib inline\nlisted = !ls {{here}}\n{head}assert listed is None\n"
    shell = "%%bash\nfor x in 1 2; do echo $x; done"
    notebook(here / "train.ipynb", head, shell, f"%%time\n%time began = {loop}")
    left = "magics and shell lines of the notebook are left out: %matplotlib, !ls, %%bash"
    made, plain = document(run, "train.ipynb"), document(run, "train.py")
    assert made["emulated"]["notebook"] == left
    assert [row["flops"] for row in made["turns"]] == [row["flops"] for row in plain["turns"]]
    notebook(here / "fails.ipynb", "x = 1", "x += 1\n\n(x\n % 0)")
    assert "fails.ipynb[cell 3]:3: ZeroDivisionError" in run("report", "fails.ipynb").err
    notebook(here / "wrong.ipynb", "x = 1", "x += 1\ny = = x")
    assert "wrong.ipynb: cell 3, line 2: no Python" in run("run", "wrong.ipynb").err
    ran = run("run", "--", "jupyter", "nbconvert", "--execute", "train.ipynb")
    assert ran.code == 2 and "as in rooftrace run train.ipynb" in ran.err


def test_jobs_of_hydra_are_said_to_be_the_first(here: Path, run: Run) -> None:
    (here / "hydra.py").write_text("jobs = [1, 2]\n")
    (here / "jobs.py").write_text(f"import hydra\nfor job in hydra.jobs:\n    exec({SCRIPT!r})\n")
    assert "jobs" not in document(run, "jobs.py")["emulated"]
    ran = run("run", "jobs.py", "--multirun", "width=1,2")
    assert ran.code == 0 and "hydra --multirun: these are steps of the first job" in ran.out


def test_afterwards_the_process_is_as_before(here: Path) -> None:
    before = sys.argv[:], sys.modules["__main__"], sys.path[:], torch.cuda.is_available()
    rt.run(["train.py"], chip="l4", steps=1)
    assert (sys.argv, sys.modules["__main__"], sys.path, torch.cuda.is_available()) == before
    assert not torch.ones(1).is_meta and torch.ones(1).device.type == "cpu"


def test_to_its_end_most_steps_are_counted_and_not_run(here: Path, run: Run) -> None:
    made = document(run, "--to-end", "train.py")
    assert made["ended"] == "end" and sum(row["turns"] for row in made["turns"]) == 18
    assert sum(row["recorded"] for row in made["turns"]) < 6
    assert (here / "log.txt").read_text() == "done"


def test_files_of_a_script_come_to_lie_in_the_scratch_folder(here: Path, run: Run) -> None:
    ran = run("run", "--to-end", "--scratch", "scratch", "train.py")
    assert ran.code == 0, ran.err
    assert not (here / "log.txt").exists()
    assert [path.name for path in (here / "scratch").rglob("*.txt")] == ["log.txt"]


def test_what_a_scratch_folder_does_not_catch_stands_before_any_figure(here: Path) -> None:
    cost = rt.run(["train.py"], chip="l4", steps=1)
    script = msgspec.structs.replace(cost.script, said={"scratch": "--scratch catches less"})
    lines = str(dataclasses.replace(cost, script=script)).splitlines()
    said = [place for place, line in enumerate(lines) if "--scratch catches less" in line]
    assert said == [2]


TIMED = """
import json, time, timeit, torch
from torch import nn
from time import monotonic_ns

model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
host = torch.randn(64, 2048)
ends, steps, halves, tests = [time.time()], [], [], []
for step in range(12):
    began, marks = time.perf_counter(), [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    sum(range(100_000))  # Python of the script's own
    optimizer.zero_grad()
    marks[0].record()
    for _ in range(4):
        loss = model(host.cuda()).square().mean()
        marks[1].record()
        loss.backward()
    marks[2].record()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    marks[3].record()
    torch.cuda.synchronize()
    steps.append(time.perf_counter() - began)
    ends.append(time.time())
    halves.append([a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:])])
    if step % 4 == 3:
        with torch.no_grad():
            start = monotonic_ns()
            model(host.cuda()).sum().item()
            tests.append((monotonic_ns() - start) / 1e9)
            tests.append(timeit.timeit(lambda: model(host.cuda()).sum().item(), number=5) / 5)
slept = time.time()
time.sleep(0.05)
while time.time() < slept + 0.1:
    pass
print("told", json.dumps([steps, ends, halves, tests, time.time() - slept]))
"""


def test_a_script_reads_the_time_that_its_steps_take_on_the_chip(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timed.py").write_text(TIMED)
    cost = rt.run([str(tmp_path / "timed.py")], chip="l4", steps=None, clock="simulated")
    steps, ends, parts, tests, slept = json.loads(capfd.readouterr().out.partition("told")[2])
    first, steady = cost.rows[0], cost.steady
    assert steady is not None and steady.stretch.run < steady.turns
    each = pytest.approx(steady.t_est, rel=0.01)
    assert steps[0] == pytest.approx(first.t_est, rel=0.01) and steps[1:] == [each] * 11
    apart = [after - before for before, after in itertools.pairwise(ends)]
    assert [apart[i] for i in range(1, 12) if i % 4] == [each] * 9  # calls are between the others
    assert [sum(part) for part in parts[1:]] == [each] * 11
    assert all(min(part) > 0.05 * steady.t_est for part in parts)
    call = next(row for row in cost.rows if row.kind == "inference")
    assert tests == pytest.approx([call.t_est] * 6, rel=0.03)  # its cache is warmer
    assert slept == pytest.approx(0.1, rel=0.1)
    assert "of this machine" in cost.script.said["simulated clock"]


def test_what_data_loaders_take_longer_than_the_step_before_is_waited_for(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cost = rt.run(["train.py"], chip="h100-sxm", steps=6, clock="simulated")
    seconds = [float(text) for text in re.findall(r"seconds ([\d.]+)", capfd.readouterr().out)]
    steady = cost.steady
    assert steady is not None
    assert all(each >= 0.99 * steady.t_est for each in seconds[2:])
    assert sum(seconds) <= 1.01 * (cost.device_seconds + cost.loading_seconds)


def test_arguments_after_the_script_are_its_own(here: Path, run: Run) -> None:
    ran = run("run", "--steps", "1", "--chip", "a100-sxm-40", "train.py", "--steps", "9")
    assert ran.code == 0 and "['--steps', '9']" in ran.out and "A100-SXM4-40GB" in ran.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected a script"),
        (("missing.py",), "missing.py"),
        (("--chip", "h900", "train.py"), "h900"),
        (("--chip", "l4", "--system", "dgx-h100", "train.py"), "a system has its own chip"),
        (("--what-if", "straglers=1", "train.py"), "did you mean 'stragglers'?"),
        (("--rank", "2", "--ranks", "2", "train.py"), "rank 2 of 2"),
        (("--chp", "l4", "train.py"), "no such option: --chp; did you mean '--chip'?"),
        (("--boundary", "bach", "train.py"), "did you mean 'batch'?"),
    ],
)
def test_a_wrong_request_is_one_line(
    words: tuple[str, ...], said: str, here: Path, run: Run
) -> None:
    ran = run("run", *words)
    assert ran.code == 2 and said in ran.err and "Traceback" not in ran.err


def test_an_error_of_the_script_names_its_line(here: Path, run: Run) -> None:
    (here / "wrong.py").write_text("import torch\nx = torch.ones(2, device='cuda')\nx @ x.new(3)\n")
    ran = run("run", "wrong.py")
    assert ran.code != 0 and "wrong.py:3" in ran.err


def test_a_script_that_exits_with_a_code_gives_it_to_the_command(here: Path, run: Run) -> None:
    (here / "exits.py").write_text("import sys\nsys.exit(3)\n")
    ran = run("run", "exits.py")
    assert ran.code == 3 and "exited with code 3" in ran.out
    ran = run("report", str(here / "exits.py"))
    assert ran.code == 2 and "the script exited with code 3" in ran.err


def test_what_a_turn_costs_by_the_shape_of_its_input(here: Path, run: Run) -> None:
    (here / "serve.py").write_text(
        "import torch\nfrom torch import nn\nnet = nn.Linear(64, 64).cuda()\n"
        "with torch.no_grad():\n"
        "    for batch in (1, 4, 4, 8, 2):\n"
        "        net(torch.ones(batch, 64, device='cuda'))\n"
    )
    cost = rt.run("serve.py", chip="l4", steps=None)
    rows = cost.by_shape()
    assert [(row.shape, row.turns) for row in rows] == [
        ((1, 64), 1), ((2, 64), 1), ((4, 64), 2), ((8, 64), 1)
    ]  # fmt: skip
    assert sum(row.flops * row.turns for row in rows) == sum(r.flops * r.turns for r in cost.rows)
    assert rows[-1].per_item * 8 == rows[-1].t_est
    assert "per item" in run("run", "--to-end", "serve.py").out
    assert rt.run("train.py", chip="l4", steps=2).by_shape() == ()


def test_a_script_without_a_device_says_so(here: Path, run: Run) -> None:
    (here / "host.py").write_text("import torch\nprint(torch.ones(3).sum())\n")
    ran = run("run", "host.py")
    assert ran.code == 0 and "nothing ran on the device" in ran.out


def test_torch_compile_chooses_how_the_step_is_run(here: Path) -> None:
    text = SCRIPT.replace("optimizer =", "model = torch.compile(model)\noptimizer =")
    (here / "compiled.py").write_text(text)
    asked = [rt.run(name, chip="l4", steps=1) for name in ("train.py", "compiled.py")]
    assert [cost.execution.name for cost in asked] == ["mixed", "mixed"]
    assert [cost.steps[-1].execution.name for cost in asked] == ["eager", "mixed"]


def test_replicas_exchange_the_gradients(here: Path) -> None:
    text = SCRIPT.replace(
        "optimizer =",
        "torch.distributed.init_process_group('nccl')\n"
        "model = nn.parallel.DistributedDataParallel(model)\noptimizer =",
    )
    (here / "ddp.py").write_text(text)
    cost = rt.run("torchrun --nproc_per_node=4 ddp.py", system="dgx-h100", steps=2)
    assert cost.steady is not None and (cost.script.rank, cost.script.world) == (0, 4)
    # Each rank of a ring sends, and gets, (n - 1) / n of the gradients twice.
    assert cost.steady.bytes_net >= 2 * 3 / 4 * 4 * PARAMETERS


def test_the_timeline_has_loaders_beside_the_device(here: Path, run: Run) -> None:
    ran = run("run", "--timeline", "run.json.gz", "--save", "step.json.gz", "train.py")
    assert ran.code == 0, ran.err
    events = json.loads(gzip.decompress((here / "run.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("load") == 3 and {"training 1", "training 3"} <= set(names)
    assert set(rt.load("step.json.gz", "training").modules) >= {"0", "2"}


def test_every_option_is_felt(here: Path, run: Run) -> None:
    (here / "rules.py").write_text(
        "import rooftrace\n@rooftrace.extend.rule('aten.addmm', override=True)\n"
        "def mm(op):\n    return rooftrace.extend.Cost.of(vector=7) + op.streamed()\n"
    )
    plain = told(document(run, "train.py"))
    ways = {
        "--chip": ("--chip", "l4"),
        "--system": ("--system", "dgx-a100"),
        "--steps": ("--steps", "2"),
        "--boundary": ("--boundary", "batch"),
        "--to-end": ("--to-end",),
        "--ranks": ("--ranks", "2"),
        "--execution": ("--execution", "naive"),
        "--tf32": ("--tf32",),
        "--host": ("--host", "desktop"),
        "--knobs": ("--knobs", "none"),
        "--assume": ("--assume", "value=3"),
        "--rules": ("--rules", "rules.py"),
    }
    from rooftrace.costmodels.ops.opview import own_rules

    for way in ways.values():
        with own_rules():
            assert told(document(run, *way, "train.py")) != plain, way
    elsewhere = {"--rank", "--clock", "--scratch", "--save", "--timeline", "--format", "--out"}
    elsewhere |= {"--force", "--traceback", "--rewrite", "--library"}
    elsewhere |= {"--exchange", "--what-if"}
    command = cli.commands["run"]
    assert isinstance(command, click.Command)
    options = {option.opts[-1] for option in command.params if isinstance(option, click.Option)}
    assert options == {*ways, *elsewhere, "--help"} - {"--help"}


def told(made: dict[str, Any]) -> str:
    """What a document says, without what was measured here."""
    rows = [{k: v for k, v in row.items() if k != "loading"} for row in made["turns"]]
    kept = {k: v for k, v in made.items() if not k.endswith(("_here", "loading_seconds"))}
    return json.dumps({**kept, "turns": rows})
