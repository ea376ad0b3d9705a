"""A report as data and as a folder of files."""

import csv
import json
import os
import re
import sys
from importlib import resources

import jsonschema
import pytest

from rooftrace._formats import USUAL
from rooftrace.costmodels.estimates.estimates import estimate
from rooftrace.graph.records import ROLES
from rooftrace.reporting.commands import reportfolder
from rooftrace.reporting.commands.reportfolder import (
    FigureError,
    Report,
    ReportFolderError,
    build_report,
    check_folder,
)
from rooftrace.reporting.sections.results import Times
from rooftrace.reporting.views.results import as_markdown, as_text
from tests.costmodels.graph_support import Builder
from tests.reporting.report_support import ROPE, made_plan, made_report, sized_memory


@pytest.fixture(scope="module")
def report() -> Report:
    return made_report(chips=("h200-sxm", "b200-sxm"), unsupported=(ROPE,))


@pytest.fixture(scope="module")
def document(report: Report) -> dict:
    return json.loads(json.dumps(report.to_dict(), allow_nan=False))


@pytest.fixture(scope="module")
def schema() -> dict:
    text = resources.files("rooftrace.reporting").joinpath("report.schema.json").read_text("utf-8")
    return json.loads(text)


# -- report.json ------------------------------------------------------------------------------


def test_schema_is_a_schema(schema):
    jsonschema.Draft202012Validator.check_schema(schema)


def test_document_keeps_to_the_schema(document, schema):
    jsonschema.validate(document, schema)


def test_a_net_of_nanoseconds_keeps_to_the_schema(schema):
    tiny = made_report("tiny", phases=("forward",), executions=("eager",)).to_dict()
    jsonschema.validate(json.loads(json.dumps(tiny, allow_nan=False)), schema)


@pytest.mark.parametrize(
    "place", [(), ("phases", "decode", "naive"), ("model",), ("memory", "decode")]
)
def test_schema_refuses_a_missing_key(document, schema, place):
    damaged = json.loads(json.dumps(document))
    found = damaged
    for key in place:
        found = found[key]
    required = {(): "coverage", ("model",): "params", ("memory", "decode"): "fits"}
    del found[required.get(place, "bytes_hbm")]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(damaged, schema)


@pytest.mark.parametrize("place", [(), ("phases", "decode", "naive"), ("coverage",)])
def test_schema_refuses_a_key_it_does_not_know(document, schema, place):
    damaged = json.loads(json.dumps(document))
    found = damaged
    for key in place:
        found = found[key]
    found["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(damaged, schema)


def each_entry(document):
    for phase, executions in document["phases"].items():
        for execution, entry in executions.items():
            yield f"{phase}, {execution}", entry


def test_bytes_have_one_key_per_role_and_sum_to_bytes_hbm(document):
    for name, entry in each_entry(document):
        assert list(entry["bytes"]) == list(ROLES), name
        assert sum(entry["bytes"].values()) == entry["bytes_hbm"], name


def test_families_parts_modules_and_operators_sum_to_the_totals(document):
    for name, entry in each_entry(document):
        for view in ("by_family", "by_part", "by_module", "by_operator"):
            entries = entry[view].values() if isinstance(entry[view], dict) else entry[view]
            assert sum(e["bytes"] for e in entries) == entry["bytes_hbm"], (name, view)
            assert sum(e["flops"] for e in entries) == entry["flops"], (name, view)
            seconds = sum(e["t_device"] for e in entries)
            assert seconds == pytest.approx(entry["t_serial"]), (name, view)


def test_savings_of_fusion_stand_in_every_form(schema):
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y = b.unary("relu", b.unary("exp", b.mm(x, w, module="up")))
    made = build_report({"forward": b.graph(y)})
    found = made.to_dict()
    jsonschema.validate(json.loads(json.dumps(found, allow_nan=False)), schema)
    fusing = found["headroom"]["forward"]
    size = 2 * 2 * 64 * 512  # written once and read once, 2 bytes each
    assert [(s["bytes"], s["ops"]) for s in fusing["fused"]] == [(size, ["aten.exp", "aten.relu"])]
    assert [(s["bytes"], s["kind"]) for s in fusing["left"]] == [(size, "epilogue")]
    steps = [fusing[name]["bytes_hbm"] for name in ("before", "after", "beyond")]
    assert steps[0] - steps[1] == steps[1] - steps[2] == size
    assert fusing["after"]["t_est"] == found["phases"]["forward"]["efficient"]["t_est"]
    page = as_markdown(made)
    assert "### What fusing saves, efficient" in page and "| exp, relu " in page


def test_a_report_of_nothing_to_fuse_says_nothing_about_it(report):
    assert "What fusing saves" not in as_markdown(report)


def test_times_are_ordered_and_those_of_the_first_chip_stand_outside(document):
    for name, entry in each_entry(document):
        for chip in entry["chips"].values():
            assert chip["t_bound"] <= chip["t_serial"] <= chip["t_est"], name
            assert chip["t_launch"] == pytest.approx(chip["t_est"] - chip["t_serial"]), name
            assert sum(chip["regime_shares"].values()) == pytest.approx(1), name
        assert entry["t_est"] == entry["chips"]["h200-sxm"]["t_est"]
        assert entry["t_est"] > entry["chips"]["b200-sxm"]["t_est"]


def test_realizable_flops_are_compute_time_at_the_headline_peak(document):
    for name, entry in each_entry(document):
        assert entry["flops_realizable"] == pytest.approx(entry["t_comp"] * entry["peak"]), name


def test_a_margin_over_nothing_is_null():
    step = made_report("tiny", phases=("forward",), executions=("efficient",))
    assert step.to_dict()["phases"]["forward"]["efficient"]["regime_margin"] > 1
    idle = estimate(made_plan("forward", []), "h200-sxm")
    assert Times(idle).to_dict()["regime_margin"] is None


def test_coverage_sums_the_phases_of_the_main_execution(document, report):
    ops = [report.estimate(phase, "efficient").coverage.ops for phase in report.phases]
    assert document["coverage"]["ops"] == sum(ops)
    assert document["coverage"]["ops_with_rule"] == sum(ops) - 3 * ROPE.count
    found = [(entry["phase"], entry["target"]) for entry in document["coverage"]["unsupported"]]
    assert sorted(found) == [(phase, ROPE.target) for phase in ("decode", "prefill", "training")]


def test_assumptions_name_their_phase(document):
    traced = [a for a in document["assumptions"] if a["kind"] != "knobs"]
    assert [a["phase"] for a in traced] == ["training"] * 3 + ["prefill"] * 3 + ["decode"] * 3
    assert len(traced) == len(document["assumptions"])  # both chips have numbers of their own
    assert len({(a["phase"], a["id"]) for a in document["assumptions"]}) == 9


def test_workload_holds_what_phases_share_and_null_where_they_differ(document):
    assert document["workload"]["batch"] == 8
    assert document["workload"]["phases"]["decode"]["items"] == 8
    assert "items" not in document["workload"]


def test_memory_says_on_how_many_of_each_chip_it_would_fit(document):
    decode = document["memory"]["decode"]
    assert decode["fits"] is False
    assert decode["chips"]["h200-sxm"]["chips_needed"] == -(-decode["peak"] // 141_000_000_000)
    assert decode["chips"]["b200-sxm"]["chips_needed"] < decode["chips"]["h200-sxm"]["chips_needed"]


def test_below_the_floor_is_said(schema):
    promised = made_report(phases=("decode",), floor=1.2)
    assert promised.to_dict()["phases"]["decode"]["efficient"]["below_floor"] is True
    assert "below the floor" in str(promised)
    steps = as_markdown(promised).split("## What a step costs")[1].split("\n## ")[0]
    assert "(below the floor)" in steps


def test_fitted_knobs_are_named_and_give_an_interval(schema):

    from rooftrace.costmodels.fusion.executions import execution_model
    from rooftrace.costmodels.kernels.knobs import Knobs

    b = Builder()
    graph = b.graph(b.mm(b.input(64, 64), b.weight(64, 64)))
    model = execution_model("eager", knobs=Knobs("of a test", 0.8, spread=0.1))
    report = build_report({"forward": graph}, ["l4"], [model])
    document = report.to_dict()
    jsonschema.validate(document, schema)
    low, high = document["phases"]["forward"]["eager"]["t_interval"]
    assert low < document["phases"]["forward"]["eager"]["t_est"] < high
    text = as_text(report.estimate("forward"))
    assert "expected by: of a test" in text and "90 % within" in text


@pytest.mark.parametrize("name", ["graphs", "chips", "executions"])
def test_nothing_to_report_is_refused(name):
    given = {"graphs": {"forward": None}, "chips": ["h200-sxm"], "executions": ["naive"]}
    empty = {} if name == "graphs" else []
    with pytest.raises(ValueError, match=f"{name.removesuffix('s')}.*: expected at least one"):
        build_report(**{**given, name: empty})


@pytest.mark.parametrize("name", ["chips", "executions"])
def test_two_of_one_name_are_refused(name):
    given = {"graphs": {"forward": None}, "chips": ["h200-sxm"], "executions": ["naive"]}
    with pytest.raises(ValueError, match="is there 2 times; give it once"):
        build_report(**{**given, name: given[name] * 2})


def test_a_step_without_kernels_is_reported(tmp_path, schema):
    plan = made_plan("forward", [])
    one = estimate(plan, "h200-sxm")
    nothing = Report(
        {"forward": {"efficient": {"h200-sxm": one}}},
        {"forward": sized_memory(0, 0, 0, 0, 0)},
        {"forward": plan.graph},
    )
    nothing.write(tmp_path / "out")
    jsonschema.validate(json.loads((tmp_path / "out" / "report.json").read_text()), schema)
    assert "0 of 0 ops have a rule" in str(nothing)


# -- the folder -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    """The files of a report, in a folder that was not there."""
    return report.write(tmp_path_factory.mktemp("report") / "new" / "report")


def test_write_makes_every_file_and_nothing_else(written):
    paths, folder = written, written[0].parent
    assert sorted(path.name for path in paths) == [
        "bytes.png", "memory.png", "ops.csv", "report.html", "report.json", "report.md",
        "roofline-decode.png", "roofline-prefill.png", "roofline-training.png", "roofline.png",
        "time.png",
    ]  # fmt: skip
    assert sorted(folder.iterdir()) == sorted([*paths, folder / "_report.json"])
    assert [path.name for path in folder.parent.iterdir()] == ["report"]


def test_write_twice_is_the_same_bytes(tmp_path):
    small = made_report("tiny", phases=("forward",))
    first = {path.name: path.read_bytes() for path in small.write(tmp_path / "a")}
    again = {path.name: path.read_bytes() for path in small.write(tmp_path / "b")}
    assert first == again


def test_page_links_only_figures_that_were_written(report, written, tmp_path):
    report.write(tmp_path / "plain", formats=("md",))
    assert sorted(os.listdir(tmp_path / "plain")) == ["_report.json", "report.md"]
    assert not re.search(r"\]\((?!#)", (tmp_path / "plain" / "report.md").read_text())
    text = (written[0].parent / "report.md").read_text()
    for name in ("roofline", "roofline-decode", "time", "bytes", "memory"):
        assert f"![{name}]({name}.png)" in text


def test_csv_has_a_row_per_kernel_of_every_phase_and_execution(report, tmp_path):
    report.write(tmp_path, formats=("csv",))
    with (tmp_path / "ops.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(one.kernels for _, _, one in report.of_first_chip())
    assert list(rows[0])[:3] == ["phase", "execution", "chip"]
    decode = [row for row in rows if row["phase"] == "decode" and row["execution"] == "efficient"]
    assert sum(int(row["bytes"]) for row in decode) == report.estimate("decode").bytes_hbm


def test_writing_into_a_folder_leaves_its_other_files_alone(report, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    report.write(tmp_path, formats=("json",))
    assert sorted(os.listdir(tmp_path)) == ["_report.json", "notes.txt", "report.json"]


def test_unknown_format_is_refused_before_anything_is_made(report, tmp_path):
    with pytest.raises(ValueError, match=f"format 'docx': expected some of {', '.join(USUAL)}"):
        report.write(tmp_path / "out", formats=("md", "docx"))
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_leaves_nothing_and_names_the_folder(report, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "report"):
        with pytest.raises(ReportFolderError) as caught:
            report.write(out)
        assert str(out) in str(caught.value)
        with pytest.raises(ReportFolderError):
            check_folder(out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reportfolder.os, "access", lambda *_: False)
    with pytest.raises(ReportFolderError, match="Permission denied"):
        check_folder(tmp_path)


def test_a_failure_half_way_leaves_nothing(report, tmp_path, monkeypatch):
    monkeypatch.setattr("rooftrace.reporting.views.results.as_page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.write(tmp_path / "a" / "out", formats=("json", "md"))
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_there_where_a_figure_fails(report, tmp_path, monkeypatch):
    monkeypatch.setattr("rooftrace.reporting.figures.printing.save", lambda *_, **__: 1 / 0)
    with pytest.raises(FigureError, match=r"ZeroDivisionError.*report.md in .* are written"):
        report.write(tmp_path / "out")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["_report.json", "ops.csv", "report.html", "report.json", "report.md"]
    assert "png" not in (tmp_path / "out" / "report.md").read_text()


def test_a_matplotlib_that_does_not_load_is_said_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FigureError, match="unset MPLBACKEND, or leave out figures"):
        check_folder(tmp_path / "out")
    check_folder(tmp_path / "out", ("md",))


def test_a_full_disk_is_a_folder_error_and_leaves_nothing(report, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(reportfolder.os, "replace", full)
    with pytest.raises(ReportFolderError, match=r"out': cannot write there: No space left"):
        report.write(tmp_path / "out", formats=("json",))
    assert list(tmp_path.iterdir()) == []


# -- report.md --------------------------------------------------------------------------------


def test_page_tables_are_whole(report):
    width = None
    for line in as_markdown(report).splitlines():
        if line.startswith("|"):
            columns = line.replace("\\|", "").count("|")
            assert width in (None, columns), line
            width = columns
        else:
            width = None


def test_page_says_what_a_reader_needs(report):
    text = as_markdown(report)
    for title in ("Verdict", "What would help, in order", "Contents", "Does it fit",
                  "What a step costs", "Training", "Prefill", "Decode", "Assumptions",
                  "Coverage", "Chips", "How to read this report"):  # fmt: skip
        assert f"\n## {title}\n" in text
    assert "671.0 GB of weights do not fit one" in text
    assert ROPE.stub in text
    assert "| 1   | balanced-routing | training, prefill, decode | `model.layers.*.mlp`" in text
    for _, fact in report.chips[0].facts():
        assert fact.source in text


def test_the_verdict_is_short(report):
    from rooftrace.reporting.sections.heads import verdict

    assert len(verdict(report).parts) <= 7  # fit, a paragraph, three phases, executions, trust
