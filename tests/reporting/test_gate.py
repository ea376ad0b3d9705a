"""The gate: what `rooftrace lock` writes, and what `rooftrace check` says of a change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.hardware import units
from rooftrace.reporting.gates import lock as records, lockfile
from rooftrace.reporting.gates.checking import Shift
from rooftrace.reporting.gates.lock import StepKey
from rooftrace.reporting.gates.lockfile import load_settings
from rooftrace.reporting.gates.making import _behind
from tests.reporting.conftest import Ran, Run
from tests.reporting.gate_support import CASTS, MODELS, SETTINGS, repository

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def repo(one_folder: Path, run: Run) -> Path:
    """A repository with a lock."""
    repository(one_folder)
    ran = run("lock")
    assert (ran.code, ran.out) == (0, "costs.lock: 2 targets, 2 steps\n"), ran.err
    return one_folder


@pytest.fixture
def change(repo: Path) -> Callable[[str, str], None]:
    """Replaces a text in the models."""

    def replace(old: str, new: str) -> None:
        path = repo / "models.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return replace


def budgets(folder: Path, lines: str, settings: str = SETTINGS) -> None:
    (folder / "pyproject.toml").write_text(f"{settings}\n[tool.rooftrace.budgets]\n{lines}\n")


# -- the lock --------------------------------------------------------------------------------------


def test_a_lock_says_what_torch_counts(repo: Path) -> None:
    """FLOPs by torch's own counter, parameters and the bytes of weights by the modules."""
    lock = lockfile.load_lock(repo / "costs.lock")
    names: dict[str, object] = {}
    exec((repo / "models.py").read_text(), names)
    for target, locked in lock.targets.items():
        model, args = names[target]()  # type: ignore[operator]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*args)
        costs = locked.phases["forward"].costs["h200-sxm"]["eager"]
        assert costs.params == sum(p.numel() for p in model.parameters())
        assert costs.memory > 4 * costs.params  # fp32, and something beside the weights
        matrix = counter.get_total_flops()
        assert matrix <= costs.flops < 1.2 * matrix + 20 * costs.params  # vector work on top


def test_modules_add_up_to_the_totals(repo: Path) -> None:
    """In decimals, digit by digit: rounding leaves nothing over."""
    for costs in lockfile.load_lock(repo / "costs.lock").places().values():
        for metric in ("flops", "bytes", "kernels"):
            assert sum(getattr(m, metric) for m in costs.modules.values()) == getattr(costs, metric)
        number, unit = costs.time.split()
        parts = [module.time.split() for module in costs.modules.values()]
        assert {part[1] for part in parts} == {unit}
        assert sum(Decimal(part[0]) for part in parts) == Decimal(number)


def test_a_lock_is_toml_with_what_it_was_made_from(repo: Path) -> None:
    text = (repo / "costs.lock").read_text()
    data = tomllib.loads(text)
    assert data["made_from"]["torch"] == torch.__version__.partition("+")[0]
    assert data["made_from"]["rooftrace"] == rt.__version__
    assert data["targets"]["net"]["sources"].keys() == {"models.py"}
    assert data["targets"]["net"]["phases"]["forward"]["ops"]["layers.*.up"] == {"addmm fp32": 3}
    assert "rooftrace check --update" in text.partition("format")[0]
    tables = [line for line in text.splitlines() if line.startswith("[targets.")]
    assert tables == sorted(tables, key=lambda line: line.split(".")[1])
    assert max(map(len, text.splitlines())) < 400


def test_a_lock_reads_back_as_it_was_written(repo: Path) -> None:
    lock = lockfile.load_lock(repo / "costs.lock")
    assert lockfile.lock_text(lock) == (repo / "costs.lock").read_text()


@pytest.mark.parametrize("seconds", [0.0, 1e-13, 7.381234567e-4, 0.9999999999, 12.5, 3e9])
def test_times_are_rounded_to_seven_digits_and_read_back(seconds: float) -> None:
    clock = records.TimeScale(seconds)
    text = clock.written(clock.rounded(seconds))
    assert units.parse(text, "second") == pytest.approx(seconds, rel=1e-6)
    noisy = seconds * (1 + 4e-16)  # the last bit of a float
    assert records.TimeScale(noisy).written(records.TimeScale(noisy).rounded(noisy)) == text


def test_depth_counts_names_and_not_numbers_of_layers(repo: Path, run: Run) -> None:
    paths = {}
    for depth in ("1", "2"):
        out = run("lock", "models.py:net", "--phase", "forward", "--depth", depth, "-o", "-").out
        target = tomllib.loads(out)["targets"]["models.py:net"]
        paths[depth] = set(target["phases"]["forward"]["ops"])
    assert paths == {
        "1": {"layers.*", "head"},
        "2": {"layers.*", "layers.*.norm", "layers.*.up", "layers.*.down", "head"},
    }


def test_one_trace_prices_every_chip_and_execution(
    repo: Path, run: Run, change: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rooftrace.tracer.phases import running

    calls: list[str] = []
    plain = running.PhaseRunner.forward
    monkeypatch.setattr(
        running.PhaseRunner,
        "forward",
        lambda self, recorder: (calls.append("forward"), plain(self, recorder))[1],
    )
    change("import torch\n", "import torch  # so that no kept trace holds\n")
    ran = run("lock", "--chip", "h200-sxm,l4", "--execution", "eager,efficient")
    assert ran.out == "costs.lock: 2 targets, 8 steps\n"
    assert len(calls) == 2  # one for each target


@pytest.mark.slow
@pytest.mark.subprocess
def test_the_same_sources_give_the_same_bytes_and_targets_see_nothing_of_each_other(
    tmp_path: Path, root: Path
) -> None:
    """Two hash seeds, two numbers of threads, two folders; one target changes torch's defaults."""
    changed = "torch.set_default_dtype(torch.bfloat16)\n"
    texts = []
    for seed in ("0", "7"):
        folder = tmp_path / seed
        folder.mkdir()
        repository(folder)
        (folder / "half.py").write_text(MODELS.replace("class Block", f"{changed}class Block", 1))
        (folder / "pyproject.toml").write_text(
            SETTINGS.replace("net =", 'before = "half.py:net"\nnet =')
        )
        threads = {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": str(1 + int(seed) // 7)}
        done = subprocess.run(
            [sys.executable, "-m", "rooftrace", "lock"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(root), **threads},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        texts.append((folder / "costs.lock").read_text())
    assert texts[0] == texts[1]
    ops = tomllib.loads(texts[0])["targets"]
    assert set(ops["before"]["phases"]["forward"]["ops"]["head"]) == {"addmm bf16"}
    assert set(ops["net"]["phases"]["forward"]["ops"]["head"]) == {"addmm fp32"}


# -- the check -------------------------------------------------------------------------------------


def test_nothing_changed(repo: Path, run: Run) -> None:
    ran = run("check")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split() == ["check", "2", "steps:", "costs", "are", "as", "locked"]


def test_a_comment_fails_nothing_unless_the_check_is_strict(
    repo: Path, run: Run, change: Callable[[str, str], None]
) -> None:
    change("import torch\n", "import torch  # a comment\n")
    ran = run("check")
    assert ran.code == 0 and "models.py differs, and no cost of cnn and net" in ran.out
    assert run("check", "--strict").code == 1
    assert run("check", "--update").code == 0
    assert run("check", "--strict").code == 0


def test_a_step_that_no_longer_fits_its_chip_is_named(
    repo: Path, run: Run, change: Callable[[str, str], None]
) -> None:
    """At the peak the middle and its gelu are alive: 2 x 4 x 64 numbers of 4 bytes for each row."""
    change("torch.ones(8, 16, 64)", 'torch.empty(2**23, 16, 64, device="meta")')
    ran = run("check")
    rows, room = 2**23 * 16, rt.load_chip("h200-sxm").room()
    assert room < rows * 2 * 4 * 64 * 4
    (line,) = [line for line in ran.out.splitlines() if "no longer fits" in line]
    peak, most = re.search(r"h200-sxm no longer fits: ([\d.]+) of ([\d.]+) GiB", line).groups()
    assert float(peak) >= rows * 2 * 4 * 64 * 4 / 2**30 and float(most) < float(peak)
    assert line.lstrip("- ") in run("check", "--format", "github").out


def test_an_exceeded_budget_names_the_module_and_its_ops(
    repo: Path, run: Run, change: Callable[[str, str], None]
) -> None:
    change("self.up(self.norm(x))", CASTS)
    ran = run("check")
    assert ran.code == 1
    assert "layers.*: " in ran.out and "+3 _to_copy fp32, +3 _to_copy fp64" in ran.out
    data = json.loads(run("check", "--format", "json").out)
    assert data["failed"]
    kernels = next(shift for shift in data["over"] if shift["metric"] == "kernels")
    assert kernels["after"] - kernels["before"] == 2 * 3  # casts, blocks
    moved = next(shift for shift in data["over"] if shift["metric"] == "bytes")
    element = 8 * 16 * 64  # of the tensor that is cast
    assert moved["after"] - moved["before"] == 3 * (4 + 8 + 8 + 4) * element  # to fp64 and back


def test_a_budget_lets_a_change_pass_up_to_its_limit(
    repo: Path, run: Run, change: Callable[[str, str], None]
) -> None:
    change("self.up(self.norm(x))", CASTS)
    for lines, code in (
        ('kernels = "6"', 0),
        ('kernels = "5"', 1),
        ("kernels = 6", 0),
        ('"forward.kernels" = 6\nkernels = 0', 0),  # the phase says more than the metric alone
        ('"layers.*.up kernels" = 0', 0),  # the casts are not in that module
        ('"layers.* kernels" = 0', 1),
        ('"*.* kernels" = [6, "<= 1 M"]', 0),
        ('"*.* kernels" = [6, "<= 3"]', 1),
        ('params = "0%"', 0),
        ('bytes = "<= 1 GB"', 0),
        ('bytes = "<= 1 B"', 1),
        ('flops = "1 GFLOP"', 0),
    ):
        budgets(repo, lines)
        ran = run("check")
        assert ran.code == code, f"{lines}: {ran.out}{ran.err}"


def test_budgets_of_a_target_stand_over_those_of_all(
    repo: Path, run: Run, change: Callable[[str, str], None]
) -> None:
    change("self.up(self.norm(x))", CASTS)
    own = '{ target = "models.py:net", budgets = { kernels = 6 } }'
    budgets(repo, "kernels = 0", SETTINGS.replace('"models.py:net"', own))
    assert run("check").code == 0
    own = own.replace("net", "cnn")
    budgets(repo, "kernels = 0", SETTINGS.replace('"models.py:cnn"', own))
    assert run("check").code == 1


def test_a_win_is_told_and_asks_for_an_update_where_that_is_set(
    repo: Path, run: Run, change: Callable[[str, str], None]
) -> None:
    change("nn.functional.gelu(self.up(self.norm(x)))", "self.up(self.norm(x))")
    ran = run("check")
    assert ran.code == 0 and "lower than in costs.lock" in ran.out
    (repo / "pyproject.toml").write_text(
        SETTINGS.replace('["eager"]', '["eager"]\nimprovements = "fail"')
    )
    assert run("check").code == 1
    assert run("check", "--update").code == 0
    assert run("check").code == 0


def test_update_writes_what_lock_writes(
    repo: Path, run: Run, change: Callable[[str, str], None]
) -> None:
    change("4 * width", "2 * width")
    assert "costs.lock: written" in run("check", "--update").out
    updated = (repo / "costs.lock").read_bytes()
    assert "nothing to update" in run("check", "--update").out
    run("lock")
    assert (repo / "costs.lock").read_bytes() == updated


def test_another_torch_is_named_as_a_likely_cause(repo: Path, run: Run) -> None:
    path = repo / "costs.lock"
    text = path.read_text().replace(
        f'torch = "{torch.__version__.partition("+")[0]}"', 'torch = "1.0"'
    )
    path.write_text(text)
    ran = run("check")
    assert ran.code == 0 and "made from other versions: torch 1.0 -> " in ran.out
    assert "a likely cause" not in ran.out
    kernels = next(line for line in text.splitlines() if line.startswith("kernels = "))
    path.write_text(_one_less(text, kernels))
    ran = run("check")
    assert ran.code == 1 and "a likely cause" in ran.out


def _one_less(text: str, line: str) -> str:
    """A lock whose first step has one kernel less, in its total and in the module with most."""
    count = int(line.split()[-1])
    text = text.replace(line, f"kernels = {count - 1}", 1)
    rows = [r for r in text.splitlines() if "kernels = " in r and r.startswith('"')]
    row = next(r for r in rows if not r.endswith("kernels = 0 }"))
    number = int(row.split()[-2])
    return text.replace(row, row.replace(f"kernels = {number}", f"kernels = {number - 1}"), 1)


def test_what_one_side_alone_has_is_stale(repo: Path, run: Run) -> None:
    (repo / "pyproject.toml").write_text(SETTINGS.replace('cnn = "models.py:cnn"', ""))
    ran = run("check")
    assert ran.code == 1 and "'cnn' is locked, and is no target any more" in ran.out
    (repo / "pyproject.toml").write_text(SETTINGS + 'more = "models.py:net"\n')
    ran = run("check")
    assert ran.code == 1 and "'more' is a target, and not locked yet" in ran.out
    sized = '{ target = "models.py:net", batch = 4 }'
    (repo / "pyproject.toml").write_text(SETTINGS.replace('"models.py:net"', sized))
    ran = run("check")
    assert ran.code == 1 and "batch is 4, locked is not said" in ran.out


def test_a_lock_of_the_command_line_needs_no_settings(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    how = ("--chip", "l4", "--execution", "eager", "--knobs", "none", "--batch", "2")
    assert run("lock", "models.py:net", *how, "--phase", "forward", "--depth", "1").code == 0
    ran = run("check", "--strict")
    assert ran.code == 0, ran.out + ran.err


def test_check_finds_the_settings_in_a_folder_above(
    repo: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "below").mkdir()
    monkeypatch.chdir(repo / "below")
    assert run("check").code == 0
    assert Path.cwd() == repo / "below"


# -- what else takes it ----------------------------------------------------------------------------


def test_other_formats(repo: Path, run: Run, change: Callable[[str, str], None]) -> None:
    change("self.up(self.norm(x))", CASTS)
    ran = run("check", "--format", "junit", "--out", "out.xml")
    assert ran.code == 1
    suite = ElementTree.parse(repo / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    issues = json.loads(run("check", "--format", "gitlab").out)
    line = (
        (repo / "costs.lock").read_text().splitlines()[issues[0]["location"]["lines"]["begin"] - 1]
    )
    assert line == "[targets.net.phases.forward.costs.h200-sxm.eager]"
    assert len({issue["fingerprint"] for issue in issues}) == len(issues)
    page = run("check", "--format", "md").out
    assert "### Causes" in page and "`layers.*`" in page


# -- what is refused -------------------------------------------------------------------------------


def refused(ran: Ran, *words: str) -> None:
    assert ran.code == 2, ran.out
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err


def test_no_lock(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run("check"), "costs.lock: there is no such file", "rooftrace lock")
    refused(run("lock"), "nothing to lock", "rooftrace lock TARGET")
    refused(run("check", "--update"), "there is no such file")


NO_COSTS_THEN_ENDLESS = """
[targets.cnn.phases.first.ops]
"*" = { mm = 1 }
[targets.cnn.phases.last.costs.l4.eager]
time = "1e400 s"
flops = 0
bytes = 0
memory = 0
params = 0
kernels = 0
[targets.cnn.phases.forward.ops]"""


PRICED = "[made_from.pricing]\n{}\n[made_from.chips]"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "rooftrace.lock/1",
            "rooftrace.lock/9",
            ("format 'rooftrace.lock/9'", "'rooftrace.lock/1'"),
        ),
        ('format = "rooftrace.lock/1"', "", ("does not say its format",)),
        ("steps = 2", "steps = 3", ("steps = 3 and holds 2", "cut off")),
        ("flops = ", "flops = 9", ("add up to",)),
        ("kernels = ", "kernel = ", ("unknown key 'kernel'", "did you mean 'kernels'")),
        ("[made_from]\n", "[made_from]\n<<<<<<< HEAD\n", ("marks of a merge",)),
        ('time = "', 'time = "-', ("costs.lock", "-")),
        ("[made_from]", "[made_from", ("not a readable lock",)),
        ("[made_from.chips]", PRICED.format("knobs = 3"), ("pricing.knobs=3", "a text")),
        ("[made_from.chips]", PRICED.format("knbs = ''"), ("'knbs'", "did you mean 'knobs'")),
        ("[targets.cnn.phases.forward.ops]", NO_COSTS_THEN_ENDLESS, ('"1e400 s"', "too large")),
    ],
)
def test_a_lock_that_was_changed_is_refused(
    repo: Path, run: Run, old: str, new: str, words: tuple[str, ...]
) -> None:
    path = repo / "costs.lock"
    path.write_text(path.read_text().replace(old, new, 1))
    refused(run("check"), "costs.lock", *words)
    assert run("check", "--update").code == 0


def test_a_lock_of_systems_is_checked_on_their_chips(one_folder: Path, run: Run) -> None:
    (one_folder / "models.py").write_text(MODELS)
    made = run("lock", "models.py:net", "--phase", "forward", "--system", "dgx-h100,dgx-a100")
    assert made.code == 0, made.err
    held = run("check", "--strict")
    assert (held.code, "2 steps" in held.out) == (0, True), held.err


def test_a_lock_that_is_cut_off_anywhere_is_refused(repo: Path) -> None:
    lines = (repo / "costs.lock").read_text().splitlines(keepends=True)
    cut = repo / "cut.lock"
    for kept in range(len(lines)):
        text = "".join(lines[:kept])
        if "".join(lines[kept:]).strip():
            cut.write_text(text)
            with pytest.raises(records.LockError):
                lockfile.load_lock(cut)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('tim = "5%"', ("'tim'", "did you mean 'time'")),
        ('time = "5 parsecs"', ("'5 parsecs'", '"5%"')),
        ('time = "-5%"', ("'-5%'",)),
        ('time = "<= 5%"', ("'<= 5%'", '"<= 2 ms"')),
        ("time = true", ("budgets",)),
        ('"decode.time" = "5%"', ("no target has the phase 'decode'", "forward")),
        ('"layer.*.up flops" = 0', ("no module 'layer.*.up'", "layers.*.up")),
        ('"layers.*.up memory" = 0', ("memory is known of the whole step only",)),
    ],
)
def test_a_budget_that_cannot_be_read_is_refused(
    repo: Path, run: Run, lines: str, words: tuple[str, ...]
) -> None:
    budgets(repo, lines)
    refused(run("check"), *words)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("executions", "execution", ("unknown key 'execution'", "did you mean 'executions'")),
        ('["eager"]', '"eager"', ("tool.rooftrace.executions='eager'", "a list")),
        ('["eager"]', '["egaer"]', ("egaer",)),
        ('"models.py:net"', '{ target = "models.py:net", bacth = 2 }', ("'bacth'", "'batch'")),
        ('"models.py:net"', '{ target = "models.py:net", kv = 2 }', ("target 'net'", "kv 2")),
        ('"models.py:net"', '"models.py:nte"', ("models.py:nte",)),
        ("[tool.rooftrace]", "[tool.rooftrace]\ndepth = 0", ("depth=0",)),
        ("[tool.rooftrace]", '[tool.rooftrace]\nimprovements = "no"', ("'told' or 'fail'",)),
    ],
)
def test_settings_that_cannot_be_read_are_refused(
    repo: Path, run: Run, old: str, new: str, words: tuple[str, ...]
) -> None:
    (repo / "pyproject.toml").write_text(SETTINGS.replace(old, new, 1))
    refused(run("check"), *words)


def test_a_target_whose_code_is_gone_is_refused(
    repo: Path, run: Run, change: Callable[[str, str], None]
) -> None:
    change("def cnn", "def resnet")
    refused(run("check"), "models.py:cnn")
    (repo / "models.py").unlink()
    refused(run("check"), "models.py")


def test_sizes_without_a_target_are_refused(repo: Path, run: Run) -> None:
    refused(run("lock", "--batch", "4"), "--batch 4", "[tool.rooftrace]")


def test_settings_of_a_project_without_the_gate_are_defaults(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    settings = load_settings(tmp_path)
    assert (settings.targets, settings.lock, settings.folder) == ({}, "costs.lock", tmp_path)


def test_a_cause_is_told_of_the_costs_that_it_moved() -> None:
    """A wider head has parameters and memory; a cast has none."""
    wide = MODELS.replace("nn.Linear(width, 10)", "nn.Linear(width, 10_000)")
    graphs = []
    for text in (MODELS, wide.replace("self.up(self.norm(x))", CASTS)):
        exec(text, names := dict[str, Any](__name__="models"))
        net, inputs = names["net"]()
        graphs.append(rt.trace(net, *inputs))
    made = rt.diff(*graphs, chip="l4", execution="eager")
    (phase,) = made.phases
    step = StepKey("net", phase.phase, "l4", "eager")

    def causes(metric: str) -> list[str]:
        total = phase.totals[metric]
        shift = Shift(place=step, metric=metric, before=total.before, after=total.after)
        return [row.cause for row in _behind(phase, shift)]

    assert any("double" in cause for cause in causes("kernels"))
    for metric in ("params", "memory"):
        assert causes(metric) and not any("double" in cause for cause in causes(metric))
