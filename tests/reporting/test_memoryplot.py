"""The figure of memory over a step, and the tables of what its peak is made of."""

import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.memory import Moment
from rooftrace.costmodels.memory.footprint import KINDS, SAVED
from rooftrace.hardware.units import format_capacity
from rooftrace.reporting.commands.reportfolder import Report
from rooftrace.reporting.figures import style
from rooftrace.reporting.figures.memoryplot import NAMES, ORDER, memory_figure, spikes


@pytest.fixture(scope="module")
def report() -> Report:
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in "12345"]
    return rt.report(nn.Sequential(*layers), torch.empty(4096, 512), chip="l4")


def test_every_kind_has_its_place_and_its_colour() -> None:
    assert sorted(ORDER) == sorted(KINDS) == sorted(style.KINDS)
    assert len({*style.KINDS.values()}) == len(KINDS)


def test_the_areas_add_up_to_the_peak(report: Report) -> None:
    figure = memory_figure(report, "training")
    (axes,) = figure.axes
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    need = report.memory["training"]
    assert max(tops) == need.peak
    (legend,) = [axes.get_legend()]
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    kinds = [name.rsplit(" ", 2)[0] for name in names]
    assert "weights" in kinds and NAMES[SAVED] in kinds and "KV" not in kinds
    shown = [text.get_text() for text in axes.texts]
    assert f"peak {format_capacity(need.peak)}" in shown
    assert {"forward", "backward", "optimizer"} <= {*shown}


def test_capacity_is_shown_where_it_is_near(report: Report) -> None:
    def texts(chip: str) -> set[str]:
        found = rt.report({"training": report.graphs["training"]}, chip=chip)
        return {text.get_text() for text in memory_figure(found, "training").axes[0].texts}

    assert "capacity of one chip" not in texts("h200-sxm")


def test_names_do_not_overlap(report: Report) -> None:
    figure = memory_figure(report, "training")
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    for i, one in enumerate(boxes):
        assert not any(one.overlaps(other) for other in boxes[i + 1 :])


def test_a_thin_spike_is_marked_and_a_broad_one_is_not() -> None:
    def moments(totals: list[int]) -> list[Moment]:
        return [
            Moment(time, time, "forward", (size, *[0] * (len(KINDS) - 1)), size)
            for time, size in enumerate(totals)
        ]

    flat = [100] * 2000
    thin, broad, steps = [*flat], [*flat], [*flat[:1000], *[200] * 1000]
    thin[700] = 150
    broad[700:760] = [150] * 60
    assert [spike.time for spike in spikes(moments(thin), 200)] == [700]
    assert spikes(moments(broad), 200) == [] == spikes(moments(steps), 200)
    assert spikes(moments(thin), 10_000) == []  # too low to be seen at all


def test_the_report_has_figures_tables_and_the_ten_largest(report: Report, tmp_path: Path) -> None:
    names = {path.name for path in report.write(tmp_path)}
    assert {"memory.png", "memory-forward.png", "memory-training.png"} <= names
    text = (tmp_path / "report.md").read_text()
    assert text.count("### Memory at the peak") == 2
    assert "![memory-training](memory-training.png)" in text and "saved for backward" in text
    found = json.loads((tmp_path / "report.json").read_text())
    schema = json.loads(
        resources.files("rooftrace.reporting").joinpath("report.schema.json").read_text("utf-8")
    )
    jsonschema.validate(found, schema)
    need = found["memory"]["training"]
    assert 0 < need["saved_at_peak"] <= need["at_peak"]["activations"]
    assert len(need["tensors"]) == 10 and len(need["modules"]) <= 10
    assert need["tensors"][0]["bytes"] == max(one["bytes"] for one in need["tensors"])
    assert need["chips"]["l4"]["max_batch"] is None
