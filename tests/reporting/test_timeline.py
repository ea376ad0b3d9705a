"""Timelines: what the viewer needs, and that the slices are those of the estimate and the run."""

import gzip
import json
from pathlib import Path

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.estimates.estimates import Estimate
from rooftrace.measured.alignment.aligning import align
from rooftrace.measured.alignment.alignment import Alignment
from rooftrace.measured.fit.misses import nodes
from rooftrace.measured.profiles.kineto import read_trace
from rooftrace.reporting.figures.parity import ParityPoint, kernel_points, parity_figure
from rooftrace.reporting.figures.timeline import timeline, write_timeline
from rooftrace.reporting.views.results import as_markdown, as_text
from rooftrace.reporting.views.validations import matched_words, miss_rows, misses_view
from tests.measured.profiles_support import GpuTrace, Stack
from tests.reporting.report_support import made_report


@pytest.fixture(scope="module")
def one() -> Estimate:
    return rt.estimate(rt.trace(Stack(12), torch.empty(4, 32)), "h200-sxm", "eager")


@pytest.fixture(scope="module")
def run(one: Estimate, tmp_path_factory: pytest.TempPathFactory) -> Alignment:
    trace = GpuTrace()
    for _ in range(3):
        trace.run(one.graph, duration=lambda op: 20.0 + op)
    path = trace.write(tmp_path_factory.mktemp("trace") / "gpu.json")
    return align(read_trace(path), one.graph)


def slices(contents: dict, process: int, track: int) -> list[dict]:
    return [
        event
        for event in contents["traceEvents"]
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (process, track)
    ]


def nested(events: list[dict]) -> bool:
    """Whether slices in the order of the file lie in each other or side by side."""
    ends: list[float] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while ends and ends[-1] <= start + 1e-5:
            ends.pop()
        if ends and end > ends[-1] + 1e-5:
            return False
        ends.append(end)
    return True


def test_the_device_track_is_the_estimate(one: Estimate) -> None:
    device = slices(timeline(one), 1, 2)
    assert len(device) == one.kernels
    assert sum(event["dur"] for event in device) == pytest.approx(one.times.t_serial * 1e6)
    assert max(event["ts"] + event["dur"] for event in device) <= one.t_est * 1e6 + 1e-3
    product = next(event for event in device if event["name"] == "addmm")
    row = one.rows[product["args"]["kernel"]]
    assert product["args"]["flop"] * row.count == row.flops_causal
    assert sum(product["args"]["bytes"].values()) * row.count == row.bytes
    assert product["args"]["module"] == "blocks.0.up"
    assert product["args"]["ops"] == list(row.ops)


def test_modules_are_nested_slices(one: Estimate) -> None:
    modules = slices(timeline(one), 1, 3)
    assert nested(modules)
    names = [event["name"] for event in modules]
    assert names.count("up") == 12 and "blocks.11" in names
    assert {event["args"].get("class") for event in modules if event["name"] == "up"} <= {
        "Linear",
        None,
    }


def test_a_long_step_is_folded(one: Estimate) -> None:
    contents = timeline(one, limit=10)
    device = slices(contents, 1, 2)
    assert len(device) < one.kernels / 2
    (fold,) = [event for event in device if event["name"].startswith("blocks.* x")]
    assert fold["dur"] > 0 and "equal to the one before" in fold["args"]["folded"]
    assert nested(device)


def test_a_profile_stands_beside_it_with_arrows(one: Estimate, run: Alignment) -> None:
    contents = timeline(one, run)
    kernels = slices(contents, 2, 1)
    assert len(kernels) == one.kernels
    assert {event["args"]["op"] for event in kernels} == {op.id for op in one.graph.kernels()}
    starts = [event for event in contents["traceEvents"] if event["ph"] == "s"]
    ends = [event for event in contents["traceEvents"] if event["ph"] == "f"]
    assert len(starts) == len(ends) == one.kernels
    assert {event["id"] for event in starts} == {event["id"] for event in ends}
    at = {event["ts"] for event in kernels}
    assert all(event["ts"] in at for event in ends)
    names = [e["args"]["name"] for e in contents["traceEvents"] if e["name"] == "thread_name"]
    assert names == [
        "host dispatch", "device", "modules", "NVIDIA H200, stream 7", "host thread 0",
    ]  # fmt: skip


def test_seconds_by_op_stand_beside_it(one: Estimate) -> None:
    seconds = {op.id: 1e-5 * one.graph.times(op) for op in one.graph.kernels()}
    shown = slices(timeline(one, seconds), 2, 1)
    assert sum(event["dur"] for event in shown) == pytest.approx(1e6 * sum(seconds.values()))


def test_the_file_is_whole_and_the_same_every_time(one: Estimate, tmp_path: Path) -> None:
    first = write_timeline(tmp_path / "a.json.gz", one).read_bytes()
    assert first == write_timeline(tmp_path / "b.json.gz", one).read_bytes()
    contents = json.loads(gzip.decompress(first))
    assert contents == json.loads(write_timeline(tmp_path / "c.json", one).read_text())
    assert contents["otherData"]["t_est_s"] == one.t_est
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "b.json.gz", "c.json"]


def test_a_report_writes_one_for_each_phase_where_it_is_asked_to(tmp_path: Path) -> None:
    report = made_report()
    written = report.write(tmp_path / "out", ("json", "trace"))
    assert [path.name for path in written] == [
        "report.json",
        *(f"timeline_{phase}.json.gz" for phase in report.phases),
    ]
    with pytest.raises(
        ValueError, match="expected some of html, md, json, csv, png, tex, svg, pdf, trace"
    ):
        report.write(tmp_path / "other", ("perfetto",))


# -- the table and the plot ----------------------------------------------------------------------


def test_the_table_has_the_worst_first_and_what_the_graph_has_not(
    one: Estimate, run: Alignment
) -> None:
    found = nodes(one, run)
    rows = miss_rows(found, run, count=5)
    assert len(rows) == 5
    furthest = max(found, key=lambda node: abs(node.miss))
    assert rows[0]["kernel"] == furthest.row.name.removeprefix("aten.")
    assert "100 % of the run's time is matched to the graph by order" in matched_words(
        found, run
    ).replace("100.0 %", "100 %")
    text = as_markdown(misses_view(found, run, count=3))
    assert text.count("\n| ") == 1 + 3 and "launch bound" in text
    screen = as_text(misses_view(found, run, count=3), width=200)
    assert len(screen.splitlines()) == 1 + 1 + 3  # what was matched, the heads, the rows


def test_the_parity_plot_has_a_point_for_each_kernel(one: Estimate, run: Alignment) -> None:
    points = kernel_points(nodes(one, run))
    assert len(points) == len(one.rows)
    assert all(point.predicted > 0 and point.measured > 0 for point in points)
    figure = parity_figure(points, "Stack", "made up")
    texts = [text.get_text() for text in figure.texts]
    assert any("inside the dashed lines" in text for text in texts)
    assert {point.group for point in points} <= set(texts)


def test_a_plot_of_cases(tmp_path: Path) -> None:
    points = [ParityPoint(f"case {i}", 1e-3 * i, 1.1e-3 * i, "vision", 1.0) for i in range(1, 5)]
    figure = parity_figure(points)
    assert "100" in next(t.get_text() for t in figure.texts if "inside" in t.get_text())
    with pytest.raises(ValueError, match="no points"):
        parity_figure([])
