"""Fleets: what workers do lands in one folder; deaths, failures and stops lose nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas
import pytest
from pandas.testing import assert_frame_equal

import rooftrace as rt
from rooftrace.reporting.commands import (
    FleetStopped,
    Task,
    fleet_tasks as fleet_parts,
    load_fleet,
    run_fleet,
)
from tests.reporting.conftest import Run

distributed = pytest.importorskip("distributed")

MODEL = """
import os, signal
import torch

def small(width=8):
    return torch.nn.Linear(width, 8), (torch.ones(4, width),)
def wide():
    return torch.nn.Linear(8, 4096), (torch.ones(4, 8),)
def broken():
    raise OSError("the disk of the target is gone")
def deadly(marker):
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return small()
"""
RULE = """
import rooftrace

@rooftrace.extend.rule("aten.addmm", override=True)
def mm(op):
    return rooftrace.extend.Cost.of(vector=7) + op.streamed()
"""
SMALL = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64,
    "n_positions": 64,
}  # fmt: skip
OVER = {"batch": "1..4"}


@pytest.fixture(autouse=True)
def here(one_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with targets: two models, one that fails, one that kills its process once."""
    monkeypatch.setenv("ROOFTRACE_CACHE", "off")
    (one_folder / "t.py").write_text(MODEL)
    return one_folder


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """What Dask sets in this process for its workers, and their folders, end with them."""
    before = [*sys.path]
    with patch.dict(os.environ):
        yield
    sys.path[:] = before
    shutil.rmtree(Path(tempfile.gettempdir(), "dask-scratch-space"), ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A scheduler and two workers in threads of this process."""
    with (
        put_back(),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            protocol="tcp://",
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
        ) as made,
    ):
        yield made


def square(number: int, **_: Any) -> list[dict[str, int]]:
    """Rows of a task."""
    return [{"number": number, "square": number * number}]


def refuses(number: int) -> list[dict[str, int]]:
    """A task that fails."""
    raise ValueError(f"{number} is odd\nand this line is of a traceback")


def tasks(*numbers: int) -> list[Task]:
    return [Task(f"task {number}", square, {"number": number}) for number in numbers]


# -- sweeps of many targets ------------------------------------------------------------------------


def single(target: str, **options: Any) -> pandas.DataFrame:
    """The lines of one sweep with a column of its target, texts as texts."""
    frame = rt.sweep(target, **options).frame()
    frame.insert(0, "target", target)
    return plain(frame)


def plain(frame: pandas.DataFrame) -> pandas.DataFrame:
    """A frame whose texts are objects, whatever they were packed as."""
    texts = {name: object for name in frame if not pandas.api.types.is_numeric_dtype(frame[name])}
    return frame.astype(texts)


@pytest.mark.parametrize("scheduler", ["none", "cluster"])
def test_a_fleet_has_the_lines_of_each_sweep_by_itself(scheduler: str, cluster: Any) -> None:
    options: dict[str, Any] = {"over": OVER, "chip": ["h200-sxm", "b200"]}
    address = cluster.scheduler_address if scheduler == "cluster" else scheduler
    result = rt.tools.sweep_fleet(
        ["t.py:small", "t.py:wide"], out="out", scheduler=address, dtype=["bf16", "fp8"], **options
    )
    alone = [single(f"t.py:{name}", dtype=["bf16", "fp8"], **options) for name in ("small", "wide")]
    expected = pandas.concat(alone, ignore_index=True)
    assert len(expected) == 2 * 4 * 2 * 2  # targets, batches, chips, precisions
    assert_frame_equal(plain(result.frame()), expected)
    read = pandas.read_parquet("out")  # as anybody reads a folder
    assert len(read) == len(expected)
    assert not result.failures


def test_each_value_of_vary_is_a_task() -> None:
    vary = {"width": [8, 16]}
    result = rt.tools.sweep_fleet(["t.py:small"], out="out", over=OVER, vary=vary, scheduler="none")
    assert list(result.fleet.tasks.values()) == ["t.py:small, width 8", "t.py:small, width 16"]
    assert_frame_equal(plain(result.frame()), single("t.py:small", over=OVER, vary=vary))


def test_what_is_there_is_not_made_again_and_what_changed_is(here: Path) -> None:
    def swept(*names: str, **changed: Any) -> rt.types.SweepFleet:
        options: dict[str, Any] = {"over": OVER, "scheduler": "none", "out": "out", **changed}
        return rt.tools.sweep_fleet(names, **options)

    assert swept("t.py:small").ran == 1
    assert swept("t.py:small", "t.py:wide").ran == 1  # the new one
    assert swept("t.py:small", "t.py:wide").ran == 0
    assert swept("t.py:small", over={"batch": [1, 2, 3, 4]}).ran == 0  # said in another way
    assert swept("t.py:small", over={"batch": "1..5"}).ran == 1  # another request
    assert swept("t.py:small", chip="b200").ran == 1
    (here / "t.py").write_text(MODEL.replace("width=8", "width=16"))
    changed = swept("t.py:small", "t.py:wide")
    assert changed.ran == 2  # another version of the source
    assert set(pandas.read_parquet("out")["target"]) == {"t.py:small", "t.py:wide"}
    assert len(pandas.read_parquet("out")) == len(changed.frame()) == 2 * 4
    (here / "t.py").write_text(MODEL)
    again = swept("t.py:small", "t.py:wide")
    assert again.ran == 0, "parts of an earlier request come back"
    assert_frame_equal(plain(again.frame()).head(4), single("t.py:small", over=OVER))


def test_a_file_and_its_imports_count_and_the_file_beside_a_config_does_not(here: Path) -> None:
    (here / "config.json").write_text(json.dumps(SMALL))
    pytest.importorskip("transformers")

    def ran(*names: str) -> int:
        return rt.tools.sweep_fleet(names, over=OVER, out="out", scheduler="none").ran

    assert ran("config.json", "t.py:wide") == 2
    (here / "beside.py").write_text("WIDTH = 8\n")  # `t.py` may import it
    assert ran("config.json", "t.py:wide") == 1
    (here / "config.json").write_text(json.dumps({**SMALL, "n_layer": 3}))
    assert ran("config.json", "t.py:wide") == 1


def test_one_target_that_fails_stops_no_other(run: Run, here: Path) -> None:
    (here / "cut.json").write_text('{"model_type": ')
    names = ("t.py:broken", "t.py:small", "cut.json", "gone.json")
    asked = ("sweep", *names, "--over", "batch=1..4", "--scheduler", "none", "-o", "out")
    ran = run(*asked)
    assert ran.code == 1
    assert "the disk of the target is gone" in " ".join(ran.out.split())
    assert "cut.json failed: target 'cut.json': not a readable JSON file" in ran.out
    assert "gone.json failed: target 'gone.json': there is no such file" in ran.out
    assert "4 tasks over batch, 1 done: 4 lines in out" in ran.out
    assert ran.err.splitlines() == [
        "1 of 4: t.py:broken failed",
        "2 of 4: t.py:small",
        "3 of 4: cut.json failed",
        "4 of 4: gone.json failed",
    ]
    whole = json.loads(run(*asked, "--format", "json").out)
    assert [failure["title"] for failure in whole["failures"]] == [
        "t.py:broken", "cut.json", "gone.json",
    ]  # fmt: skip
    assert [line["batch"] for line in whole["lines"]] == [1, 2, 3, 4]
    csv = run(*asked, "--format", "csv")
    assert csv.code == 1 and "rooftrace: cut.json failed: " in csv.err
    assert len(csv.out.splitlines()) == 1 + 4
    assert "- cut.json failed: " in run(*asked, "--format", "md").out


def test_a_config_and_a_form_travel_to_a_worker_without_their_disk(
    here: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rooftrace.reporting.commands import fleet_sweeps

    rt.tools.form("t.py:small", over=OVER).save("small.form.json")
    alone = single("small.form.json", over=OVER)
    source = fleet_sweeps.FleetSource.of("small.form.json").carried()
    code = fleet_sweeps.FleetSource.of("t.py:small").carried()
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (here / "small.form.json").rename(elsewhere / "moved.json")
    with source.there() as name:
        assert Path(name).name == "small.form.json"
        frame = rt.sweep(name, over=OVER).frame()
    assert_frame_equal(plain(frame), alone.drop(columns="target"))
    (here / "t.py").write_text(f"{MODEL}\n# another version")
    with (
        pytest.raises(
            rt.types.TargetError, match=r"t\.py:small: this worker does not have the files"
        ),
        code.there(),
    ):
        pass


def test_workers_use_rules_of_a_file_and_forget_them(here: Path, cluster: Any) -> None:
    rule = "import rooftrace\n@rooftrace.extend.rule('aten.addmm', override=True)\ndef mm(op):\n"
    (here / "rules.py").write_text(
        f"{rule}    return rooftrace.extend.Cost.of(vector=7) + op.streamed()\n"
    )
    asked: dict[str, Any] = {"over": OVER, "scheduler": cluster.scheduler_address, "out": "out"}
    names = ["t.py:small", "t.py:wide"]
    without = rt.tools.sweep_fleet(names, **asked).frame()
    ruled = rt.tools.sweep_fleet(names, rules=["rules.py"], **asked).frame()
    assert list(ruled["flops"]) == 8 * [7]
    again = rt.tools.sweep_fleet(names, **{**asked, "out": "other"}).frame()
    assert list(again["flops"]) == list(without["flops"])
    assert min(without["flops"]) > 7


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"out": "t.py"}, "out='t.py': expected a folder, and this is a file"),
        ({"out": "sweep.csv"}, "out='sweep.csv': several targets write a folder"),
        ({"targets": []}, r"targets=\[\]: expected at least one target"),
        ({"targets": ["t.py:wide", "t.py:wide"]}, "target 't.py:wide' stands twice"),
        ({"targets": [len]}, r"a worker builds its model by itself; expected the name"),
        ({"over": {"batch": "9..2"}}, "--over batch=9..2: the range is empty"),
        ({"over": {"bacth": "1..2"}, "targets": ["gpt2"]}, "size 'bacth': .* mean 'batch'"),
        ({"bacth": 3}, r"sweep\(bacth=3\): no such argument; did you mean 'batch'"),
        ({"dtype": "fp9"}, "fp9"),
        ({"rules": ["none.py"]}, "rules: 'none.py': it cannot be read"),
        ({"scheduler": "nowhere"}, "scheduler='nowhere': expected the address of a Dask scheduler"),
        ({"workers": 0}, "workers=0: expected a whole number from 1 on"),
        ({"workers": 2, "scheduler": "tcp://h:1"}, "workers=2: scheduler='tcp://h:1' has its own"),
        ({"retries": -1}, "retries=-1: expected a whole number from 0 on"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_before_any_work(
    changed: dict[str, Any], said: str, here: Path
) -> None:
    asked: dict[str, Any] = {"targets": ["t.py:wide"], "out": "out", "over": OVER}
    before = sorted(here.iterdir())
    with pytest.raises(ValueError, match=said):
        rt.tools.sweep_fleet(**{**asked, **changed})
    assert sorted(here.iterdir()) == before


def test_the_command_says_what_is_for_one_target(run: Run, here: Path) -> None:
    two = ("sweep", "t.py:wide", "t.py:small", "--over", "batch=1..2")
    for options, said in (
        ((), "2 TARGETs: say where results land with -o FOLDER"),
        (("-o", "out", "--plot", "a.png"), "--plot a.png: it is for one TARGET"),
        (("-o", "out", "--save-form", "f.json"), "--save-form f.json: it is for one TARGET"),
        (("-o", "t.py"), "'t.py' is an input of this command"),
    ):
        ran = run(*two, *options)
        assert ran.code == 2 and said in ran.err and not ran.out


def test_a_scheduler_that_is_not_there(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooftrace.reporting.commands.fleets._ANSWERS", 0.2)
    asked = ("sweep", "t.py:wide", "--over", "batch=1..2", "-o", "out", "--scheduler")
    ran = run(*asked, "tcp://127.0.0.1:9")
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    assert line.startswith("rooftrace: scheduler='tcp://127.0.0.1:9': no Dask scheduler answers")
    assert "start one with `dask scheduler`" in line


@pytest.mark.parametrize("library", ["distributed", "pyarrow"])
def test_a_library_that_is_not_installed_names_its_extra(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(rt.types.RequestError, match=rf"needs {library}.*'rooftrace\[fleet\]'"):
        run_fleet(tasks(1, 2), "out")


# -- tasks -----------------------------------------------------------------------------------------


def test_rows_of_a_fleet_are_in_the_order_of_its_tasks(cluster: Any) -> None:
    result = run_fleet(tasks(3, 1, 2), "out", scheduler=cluster.scheduler_address)
    assert list(result.frame()["number"]) == [3, 1, 2]
    assert list(load_fleet("out").frame()["square"]) == [9, 1, 4]
    assert [list(frame["number"]) for _, frame in result.frames()] == [[3], [1], [2]]


def test_a_failure_is_recorded_and_tried_again_by_the_next_call(cluster: Any) -> None:
    asked = [*tasks(2, 4), Task("odd", refuses, {"number": 3})]
    for ran in (3, 1):
        result = run_fleet(asked, "out", scheduler=cluster.scheduler_address)
        assert result.ran == ran
        (failure,) = result.failures
        assert (failure.title, failure.error) == ("odd", "3 is odd")
        assert load_fleet("out").failures == result.failures
    assert list(result.frame()["number"]) == [2, 4]


def test_a_part_that_is_damaged_or_of_another_release_is_made_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_fleet(tasks(1, 2, 3), "out", scheduler="none")
    first, second, _ = (result.part(key) for key in result.tasks)
    first.write_bytes(first.read_bytes()[:-20])
    second.write_bytes(second.read_bytes()[:40] + b"?" + second.read_bytes()[41:])
    assert len(load_fleet("out").frame()) < 3
    assert run_fleet(tasks(1, 2, 3), "out", scheduler="none").ran == 2
    monkeypatch.setattr(fleet_parts, "releases", lambda: {"rooftrace": "0.0", "torch": "9"})
    assert run_fleet(tasks(1, 2, 3), "out", scheduler="none").ran == 3


def test_a_stop_keeps_what_is_done_and_the_next_call_goes_on() -> None:
    def stops(words: str) -> None:
        if words.startswith("2 of"):
            raise KeyboardInterrupt

    with pytest.raises(FleetStopped, match="stopped with 2 of 4 tasks done, all kept in out"):
        run_fleet(tasks(1, 2, 3, 4), "out", scheduler="none", progress=stops)
    assert load_fleet("out").waiting == tuple(task.key for task in tasks(3, 4))
    assert run_fleet(tasks(1, 2, 3, 4), "out", scheduler="none").ran == 2


def test_a_worker_of_another_release_says_so(monkeypatch: pytest.MonkeyPatch, cluster: Any) -> None:
    monkeypatch.setattr(
        "rooftrace.reporting.commands.fleet_tasks.releases",
        lambda: {"rooftrace": "0.0", "torch": "9"},
    )
    result = run_fleet(tasks(1, 2), "out", scheduler=cluster.scheduler_address)
    assert {f.error.partition(", the caller")[0] for f in result.failures} == {
        "the worker has rooftrace 0.0, torch 9"
    }


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_worker_that_is_killed_loses_nothing(here: Path) -> None:
    """Processes of their own: one kills itself in the middle of a target, the first time."""
    marker = str(here / "died")
    vary = {"marker": [marker]}
    (here / "u.py").write_text(MODEL.replace("def small(width=8)", "def small(marker, width=8)")
                               .replace("def wide()", "def wide(marker)")
                               .replace("return small()", "return small(marker)"))  # fmt: skip
    said: list[str] = []
    names = ["u.py:small", "u.py:deadly", "u.py:wide"]
    asked: dict[str, Any] = {"out": "out", "over": OVER, "vary": vary}
    result = rt.tools.sweep_fleet(names, **asked, workers=1, retries=1, progress=said.append)
    assert Path(marker).exists(), "nothing died"
    assert not result.failures and result.ran == 3
    alone = [single(name, over=OVER, vary=vary) for name in names]
    assert_frame_equal(plain(result.frame()), pandas.concat(alone, ignore_index=True))
    assert "3 of 3: " in said[-1]

    # One that kills whatever runs it fails alone; what waited behind it is done.
    def kills(number: int) -> list[dict[str, int]]:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"number": number}]

    three = [Task(f"task {n}", kills, {"number": n}, key=f"k{n}") for n in (1, 2, 3)]
    fleet = run_fleet(three, "tasks", workers=1, retries=0)
    assert [failure.title for failure in fleet.failures] == ["task 2"]
    assert "every worker that ran it died" in fleet.failures[0].error
    assert list(fleet.frame()["number"]) == [1, 3]
    with contextlib.suppress(FileNotFoundError):
        assert not list(Path("tasks").glob(".rooftrace-*")), "nothing hidden stays"


def test_files_of_the_user_stay_and_no_part_leaves_the_folder(here: Path) -> None:
    out, private = here / "out", here / "private"
    (out / "_earlier").mkdir(parents=True)
    private.mkdir()
    for name in ("thesis", "_earlier/thesis"):
        pandas.DataFrame({"mine": [1]}).to_parquet(out / f"{name}.parquet")
    asked: dict[str, Any] = {"over": {"batch": [1]}, "scheduler": "none", "out": out}
    rt.tools.sweep_fleet(["t.py:small", "t.py:wide"], **asked)
    rt.tools.sweep_fleet(["t.py:small"], **asked)
    assert (out / "thesis.parquet").is_file() and (out / "_earlier/thesis.parquet").is_file()
    assert len(list((out / "_earlier").iterdir())) == 2
    (out / "_earlier").rename(here / "aside")
    (out / "_earlier").symlink_to(private)
    with pytest.raises(ValueError, match="_earlier: a link"):
        rt.tools.sweep_fleet(["t.py:wide"], **asked)
    assert not list(private.iterdir())
