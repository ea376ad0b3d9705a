"""Scripts that are measured on the device at hand, and what their predictions are set beside."""

from pathlib import Path

import pytest
import torch

import rooftrace as rt
from rooftrace.errors import RequestError, TargetError
from rooftrace.measured.bench import Bench, Run, SuitePlan
from rooftrace.measured.bench.session import script_rows
from rooftrace.reporting.cli import main

CLOCK = """
from rooftrace.scripts.steps import real_steps as realturns, watching
now = [0.0]
def add(seconds): now[0] += seconds
for home in (realturns, watching):
    home.perf_counter = lambda: now[0]
"""
"""The clock of the process that runs the script: it goes on where the script says so."""
SCRIPT = """
import os
import sys
import torch
from torch import nn
import seconds_passed
device = sys.argv[1]
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, place):
        seconds_passed.add(20.0)
        return torch.randn(32, 64)

for epoch in range(3):
    for x in torch.utils.data.DataLoader(Slow(), batch_size=2):
        model(x.to(device)).square().mean().backward()
        seconds_passed.add(3.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(16, 64, device=device))
            seconds_passed.add(1.0)
with open("done.txt", "w") as file:
    file.write(str(os.environ.get("WORLD_SIZE")))
"""


def asked(*words: str) -> int:
    """The exit code of a command, run here."""
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seconds_passed.py").write_text(CLOCK, encoding="utf-8")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def bench(seconds: float = 60.0) -> Bench:
    return Bench(torch.device("cpu"), seconds, lambda line: None)


def test_turns_of_a_real_run_are_timed_without_what_they_wait_for(script: Path) -> None:
    training, forward = script_rows(f"{script} cpu", bench())
    assert (training.phase, forward.phase) == ("training", "forward")
    assert training.seconds == (3.0,) * (3 * 6 - 3) and forward.seconds == (1.0,) * (3 * 5 - 3)
    # Of six steps five wait for the next batch, which takes 2 x 20 s.
    assert "32.0 s of data loaders each" in training.note
    assert Path("done.txt").read_text() == "None"  # it ran to its end, on files of its own
    assert training.model == forward.model == f"run:--steps 18 {script} cpu"


def test_the_user_says_how_many_steps(script: Path) -> None:
    (row,) = script_rows(f"run:--steps 5 {script} cpu", bench())
    assert len(row.seconds) == 5 - 3 and not Path("done.txt").exists()
    training, _ = script_rows(f"{script} cpu --steps 2", bench())  # an option of its own
    assert len(training.seconds) == 3 * 6 - 3
    with pytest.raises(RequestError, match="--boundary batch"):
        script_rows(f"run:--boundary batch {script} cpu", bench())


def test_the_budget_ends_a_script(script: Path) -> None:
    (row,) = script_rows(f"{script} cpu", bench(-1e12))
    assert len(row.seconds) == 1


def test_measured_beside_predicted(script: Path) -> None:
    command = [f"{script} cpu", "--device", "cpu", "-o", "run.json.gz", "--budget", "60"]
    assert asked("measure", *command) == 0
    run = Run.load("run.json.gz")
    assert [row.phase for row in run.models] == ["training", "forward"]
    with pytest.raises(ValueError, match="what such a file names is not run"):
        rt.validate("run.json.gz", "l4")
    result = rt.validate(run, "l4", target=f"run:--steps 7 {script} cuda")
    assert [step.phase for step in result.steps] == ["training", "forward"]
    assert all(step.predicted > 0 for step in result.steps)
    assert "measured on" in result.notes[0]  # another device than the one that is predicted


def test_what_a_script_that_fails_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text, error in (
        ("raises.py", "raise KeyError('weights')", "failed on cpu: KeyError: 'weights'"),
        ("exits.py", "import sys; sys.exit(3)", "exited with code 3"),
        ("nothing.py", "print('hello')", "none of its modules ran on cpu"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(TargetError, match=error):
            script_rows(name, bench())
    with pytest.raises(RequestError, match="start them with it, each measuring"):
        script_rows("run:torchrun --nproc_per_node=2 nothing.py", bench())


def test_what_measure_does_not_take_of_a_script(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in (["--batch", "4"], ["--phase", "training"]):
        words = [f"{script} cpu", "--device", "cpu", "-o", "run.json", *option]
        assert asked("measure", *words) == 2
        assert "options of its own" in capsys.readouterr().err
    assert asked("calibrate", "--run", str(script), "-o", "knobs.toml") == 2
    assert "is measured into a file" in capsys.readouterr().err


def test_each_rank_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SuitePlan.of(out="runs/a.json.gz", device="cpu").out == Path("runs/a.json.gz")
    monkeypatch.setenv("RANK", "3")
    assert SuitePlan.of(out="runs/a.json.gz", device="cpu").out == Path("runs/a-rank3.json.gz")


def test_a_run_of_another_device_is_still_a_run(script: Path) -> None:
    rows = script_rows(f"run:--steps 4 {script} cpu", bench())
    run = Run(device={"name": "here", "type": "cpu"}, versions={}, models=tuple(rows))
    assert run.done() == {rows[0].key}
