"""Names that no file can have, and very long ones: one message each, from every reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import is_ours
from rooftrace.reporting.cli import main

NAMES = {
    "NUL": "a\0b",
    "a surrogate": "\ud800x",
    "long": "a" * 100_000,
    "long parts": "/".join(["b" * 300] * 3),
    "a newline": "a\nb",
}
ENDS = ("", ".json", ".toml", ".py:f", ".safetensors", ".gguf", ".onnx", ".pt2", "/config.json")
GRAPH = rt.trace(nn.Linear(8, 8), torch.ones(2, 8))
USES: dict[str, Callable[[str], Any]] = {
    "trace": lambda name: rt.trace(name, batch=1),
    "load": rt.load,
    "chip": lambda name: rt.estimate(GRAPH, chip=name),
    "execution": lambda name: rt.estimate(GRAPH, chip="l4", execution=name),
    "knobs": lambda name: rt.tools.execution_model("efficient", knobs=name),
    "system": lambda name: rt.estimate(GRAPH, system=name),
    "form": rt.types.Form.load,
    "run file": rt.types.Run.load,
    "validate": lambda name: rt.validate(name, "l4", target=GRAPH),
    "calibrate": lambda name: rt.calibrate(name, "l4"),
    "inventory": rt.inventory,
    "histogram": lambda name: rt.trace(
        nn.Linear(8, 8), torch.ones(2, 8), assume={"routing": f"histogram:{name}"}
    ),
    "phase": lambda name: rt.trace(nn.Linear(8, 8), torch.ones(2, 8), phase=name),
    "run": lambda name: rt.run([name]),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", USES)
def test_no_such_file_is_one_message(use: str, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for end in ENDS:
        with pytest.raises((ValueError, LookupError, RuntimeError, OSError)) as raised:
            USES[use](f"{NAMES[name]}{end}")
        error = raised.value
        assert is_ours(error) or (isinstance(error, OSError) and error.strerror), end
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["NUL", "a surrogate", "long", "long parts"])
def test_nothing_is_written_where_no_file_can_be(name: str, tmp_path: Path) -> None:
    for write in (
        lambda place: rt.save(GRAPH, place),
        lambda place: rt.report(GRAPH, chip="l4", execution="eager", out=place),
        lambda place: rt.tools.save_timeline(rt.estimate(GRAPH, chip="l4"), place),
    ):
        with pytest.raises((OSError, ValueError)) as raised:
            write(f"{tmp_path}/{NAMES[name]}")
        assert is_ours(raised.value) or getattr(raised.value, "strerror", None)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "words",
    [("report", "@"), ("trace", "@"), ("chips", "show", "@"), ("@",), ("check", "--lock", "@")],
)
def test_a_command_says_it_in_one_message(
    words: tuple[str, ...], name: str, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main([word.replace("@", NAMES[name]) for word in words])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and 0 < len(said) < 5000 and "Traceback" not in said


def test_a_form_that_a_result_has_not_is_refused(capsys: Any, tmp_path: Path) -> None:
    rt.save(GRAPH, tmp_path / "g.json")
    with pytest.raises(SystemExit) as stop:
        main(["diff", *[str(tmp_path / "g.json")] * 2, "-o", str(tmp_path / "d.csv")])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "expected a file of md, html, tex, json" in said
