"""Attackers on what runs long: killed at any moment, and two at a time in one folder.

Whatever happens, files of the user stay, files of a result are whole or not there, and the next run
ends as one that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.reporting.commands import load_fleet

PACKAGE = Path(rt.__file__).parents[1]
MINE = {"thesis.parquet": None, "notes.txt": b"mine", "_earlier/thesis.parquet": None}
"""Files of the user's in the folder of a fleet; None: a table."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.subprocess,
    pytest.mark.skipif(os.name == "nt", reason="signals of POSIX"),
]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forms that are priced without torch, and a table of measured steps."""
    folder = tmp_path_factory.mktemp("forms")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32}
    for number in range(4):
        path = folder / f"m{number}.json"
        path.write_text(json.dumps({**config, "vocab_size": 32 + number, "n_positions": 16}))
        form = rt.tools.form(str(path), over={"batch": [1, 2, 3]}, seq=4)
        form.save(folder / f"m{number}.form.json")
    rows = [f"m0,{batch},8,prefill,bf16,eager,h100-sxm,{1 + batch / 20}" for batch in (1, 2, 4)]
    head = "model,batch,seq,phase,dtype,execution,chip,ms"
    (folder / "steps.csv").write_text("\n".join([head, *rows, ""]))
    return folder


def started(*words: str, here: Path) -> subprocess.Popen[bytes]:
    script = "from rooftrace.reporting.cli import run; run()"
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        cwd=here, env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def fleet(there: Path, out: Path) -> subprocess.Popen[bytes]:
    forms = [str(there / f"m{number}.form.json") for number in range(4)]
    return started(
        *("sweep", *forms, "--over", "batch=1..3", "--scheduler", "none", "-o", str(out)),
        here=there,
    )


def ended(process: subprocess.Popen[bytes], after: float | None = None) -> int:
    """Wait for a process, or kill it and all that it started after some seconds."""
    try:
        process.communicate(timeout=after or 300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode


def lines(out: Path) -> list[Any]:
    frame = load_fleet(out).frame()
    return frame.astype(str).values.tolist()  # type: ignore[no-any-return]


def test_fleets_that_are_killed_or_beside_each_other_lose_nothing(
    there: Path, tmp_path: Path, fuzz_seconds: float
) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    whole = tmp_path / "whole"
    begin = time.monotonic()
    assert ended(fleet(there, whole)) == 0
    took = time.monotonic() - begin
    expected = lines(whole)
    rng, end, number = random.Random(0), time.monotonic() + fuzz_seconds, 0
    while number < 2 or time.monotonic() < end:
        number += 1
        out = tmp_path / str(number)
        (out / "_earlier").mkdir(parents=True)
        for name, content in MINE.items():
            path = out / name
            if content is None:
                pandas.DataFrame({"mine": [number]}).to_parquet(path)
            else:
                path.write_bytes(content)
        before = {name: (out / name).read_bytes() for name in MINE}
        two = [fleet(there, out), fleet(there, out)]
        for process in two:
            if rng.random() < 0.7:
                ended(process, rng.uniform(0.5, 1.0) * took)
        for process in two:
            ended(process)
        for part in out.glob("*.parquet"):
            pandas.read_parquet(part)  # whole
        if (out / "_fleet.json").exists():
            load_fleet(out)
        assert ended(fleet(there, out)) == 0
        assert lines(out) == expected
        assert not load_fleet(out).failures and not load_fleet(out).waiting
        assert {name: (out / name).read_bytes() for name in MINE} == before
        visible = {path.name for path in out.iterdir() if not path.name.startswith(".rooftrace")}
        assert visible == {"_fleet.json", "_earlier", "thesis.parquet", "notes.txt"} | {
            path.name for path in whole.glob("*.parquet")
        }


@pytest.mark.heavy
def test_a_calibration_that_is_killed_leaves_the_old_knobs_or_the_new(
    there: Path, tmp_path: Path, fuzz_seconds: float
) -> None:
    def calibration(out: Path) -> subprocess.Popen[bytes]:
        return started(
            *("calibrate", "steps.csv", "--chip", "h100-sxm", "--target", "{target}.json"),
            *("--free", "launch", "-o", str(out)),
            here=there,
        )

    begin = time.monotonic()
    assert ended(calibration(tmp_path / "new.toml")) == 0
    took = time.monotonic() - begin
    new = (tmp_path / "new.toml").read_bytes()
    rng, end, number = random.Random(0), time.monotonic() + fuzz_seconds, 0
    while number < 2 or time.monotonic() < end:
        number += 1
        out = tmp_path / str(number) / "knobs.toml"
        out.parent.mkdir()
        out.write_bytes(new.replace(b"rooftrace", b"Rooftrace"))
        old = out.read_bytes()
        ended(calibration(out), rng.uniform(0.7, 1.0) * took)
        assert out.read_bytes() in (old, new)
        assert ended(calibration(out)) == 0
        assert out.read_bytes() == new
        assert all(p == out or p.name.startswith(".rooftrace") for p in out.parent.iterdir())
