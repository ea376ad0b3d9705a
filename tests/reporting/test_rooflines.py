"""Several models, chips and sizes on one roofline: a record, and one figure."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError, TargetError
from rooftrace.reporting.figures.printing import MEDIA
from rooftrace.reporting.figures.roofline import _points, roofline_figure
from rooftrace.reporting.figures.style import Box, Label, place
from rooftrace.reporting.renderers import view
from rooftrace.reporting.views.explanations import rooflines_view
from tests.reporting.conftest import Run

pytestmark = pytest.mark.usefixtures("kept_targets")


@pytest.fixture(scope="module")
def steps() -> rt.types.Rooflines:
    graphs = [
        rt.trace(
            nn.Sequential(nn.Linear(256, n), nn.ReLU(), nn.Linear(n, 256)), torch.ones(64, 256)
        )
        for n in (512, 4096)
    ]
    return rt.roofline(graphs, chip=["h200-sxm", "l4"], execution="eager")


def test_rows_are_the_estimates_one_by_one(steps: rt.types.Rooflines) -> None:
    assert [row.chip for row in steps.rows] == ["h200-sxm", "l4"] * 2
    assert steps.models == ["Sequential 1", "Sequential 2"]
    for row in steps.rows:
        alone = rt.estimate(row.estimate.graph, chip=row.chip, execution="eager")
        assert row.rate is not None
        assert row.rate * alone.t_est == pytest.approx(alone.flops_causal)
        assert row.share is not None and 0 < row.share <= 1
        assert row.network_rate is None  # one process sends nothing
    frame = steps.to_frame()
    assert list(frame["t_est"]) == [row.estimate.t_est for row in steps.rows]
    assert steps.to_dict()["steps"] == steps.to_rows()


def test_what_all_steps_share_is_told_once(steps: rt.types.Rooflines) -> None:
    """By the heading, not by a column; what differs has one."""

    def heads(result: rt.types.Rooflines) -> list[str]:
        (section,) = rooflines_view(result, "screen").sections
        (table,) = (part for part in section.parts if isinstance(part, view.Table))
        return [column.key for column in table.columns[: table.leading]]

    assert heads(steps) == ["model", "chip"] and "forward" in steps.conditions
    one = "examples/models/resnet.py:build"
    swept = rt.roofline(one, batch=(1, 2), phases=["forward"], chip="l4")
    assert heads(swept) == ["model", "batch"] and "l4" in swept.conditions
    alone = rt.roofline(one, batch=2, phases=["forward"], chip="l4")
    assert heads(alone) == ["model"] and "batch 2" in alone.conditions


def test_a_chip_has_one_shape_and_no_other_chip_has_it(steps: rt.types.Rooflines) -> None:
    shapes: dict[str, set[str]] = {}
    for row, point in zip([r for line in steps.lines for r in line], _points(steps), strict=True):
        shapes.setdefault(row.chip, set()).add(point.marker)
    (one,), (other,) = shapes.values()
    assert one != other


def test_no_step_is_faster_than_its_launches_allow(steps: rt.types.Rooflines) -> None:
    for row in steps.rows:
        assert row.launch_rate is not None and row.rate is not None
        assert row.rate <= row.launch_rate * (1 + 1e-9)
        # eager: the host launches each op, at the seconds that the chip says
        assert row.estimate.times.regime != "launch" or row.rate > 0.5 * row.launch_rate


def test_sizes_of_a_target_are_joined_in_order(tmp_path: Path) -> None:
    result = rt.roofline(
        "examples/models/resnet.py:build", batch=(8, 1, 2), phases=["forward"], chip="l4"
    )
    assert [row.sizes["batch"] for row in result.rows] == [1, 2, 8]
    assert result.over == "batch" and len(list(result.lines)) == 1
    flops = [row.estimate.flops_causal for row in result.rows]
    assert [flop / flops[0] for flop in flops] == pytest.approx([1, 2, 8], rel=1e-5)
    result.plot(tmp_path / "a.svg", style="paper")
    assert b">batch 1<" in (tmp_path / "a.svg").read_bytes()


def test_the_figure_has_a_ridge_for_each_chip_and_no_text_over_another(steps) -> None:
    figure = roofline_figure(steps)
    figure.canvas.draw()
    texts = [text.get_text() for text in figure.texts]
    assert sum(text.startswith("ridge ") for text in texts) >= 2
    assert any(text.startswith("Sequential 2") for text in texts)
    boxes = [text.get_window_extent() for text in figure.texts]
    for one, other in itertools.combinations(boxes, 2):
        wide = min(one.x1, other.x1) - max(one.x0, other.x0)
        assert min(wide, min(one.y1, other.y1) - max(one.y0, other.y0)) < 3


def test_a_column_names_each_of_five_models_once_inside_the_figure() -> None:
    graphs = [
        rt.trace(nn.Linear(256 * n, 256 * n), torch.empty(64 * n, 256 * n, device="meta"))
        for n in (1, 2, 4, 8, 16)
    ]
    given = ["Small", "Base", "Large", "Huge", "Giant"]
    result = rt.roofline(graphs, chip=["h100-sxm", "l4"], names=given)
    assert result.models == given
    figure = roofline_figure(result, MEDIA["paper-column"])
    figure.canvas.draw()
    labels = [text for text in figure.texts if text.get_fontsize() == 9.5]  # not of the title
    names = [text for text in labels if text.get_text() in given]
    assert sorted(text.get_text() for text in names) == sorted(given)
    inside = figure.axes[0].get_window_extent()
    boxes = [text.get_window_extent() for text in names]
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
    for one, other in itertools.combinations(boxes, 2):
        wide = min(one.x1, other.x1) - max(one.x0, other.x0)
        assert min(wide, min(one.y1, other.y1) - max(one.y0, other.y0)) < 3


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"batch": (1, 2), "seq": (3, 4)}, "batch and seq have several values each"),
        ({"batch": 0}, "batch=0: expected whole numbers above 0"),
        ({"batch": ()}, "batch=none: expected"),
        ({"batch": range(1, 400)}, "expected 200 at most"),
        ({"names": ["a", "b"]}, "names 'a,b': expected 1 name, one for each target"),
        ({"names": [""]}, "names '': expected 1 name"),
    ],
)
def test_a_wrong_call_is_refused(asked: dict, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        rt.roofline("gpt2", **asked)
    with pytest.raises(RequestError, match="at least one target"):
        rt.roofline([])


def test_a_name_of_nothing_is_refused_before_any_model_is_traced() -> None:
    told: list[str] = []
    with pytest.raises(TargetError, match=r"'gpt-2': expected .*did you mean 'gpt2'"):
        rt.roofline(["gpt2", "gpt-2"], progress=told.append)
    assert not told


def test_the_command_prints_the_table_and_says_what_is_wrong(run: Run, tmp_path: Path) -> None:
    ran = run(
        "roofline", "examples/models/resnet.py:build", "--phase", "forward", "--batch", "1,2",
        "--plot", tmp_path / "roofs.pdf", "--style", "paper-column",
    )  # fmt: skip
    assert ran.code == 0 and "ridge" in ran.out and (tmp_path / "roofs.pdf").is_file()
    for wrong in (("--batch", "1,-2"), ("--plot", "a.jpg"), ("--style", "paper")):
        ran = run("roofline", "gpt2", *wrong)
        assert ran.code == 2 and ran.err.count("\n") == 1
        assert " ".join(wrong) in ran.err


def test_steps_of_other_sizes_and_precisions_have_a_column_for_each() -> None:
    single = rt.trace(nn.Linear(64, 64), torch.empty(8, 64, device="meta"))
    half = nn.Linear(64, 64, device="meta", dtype=torch.bfloat16)
    graphs = [single, rt.trace(half, torch.empty(2, 64, device="meta", dtype=torch.bfloat16))]
    result = rt.roofline(graphs, chip="l4", names=["A", "B"])
    head, columns, first, second, *_ = str(result).splitlines()
    assert head == "bf16, fp32; forward; efficient; l4"
    assert columns.split()[:3] == ["model", "batch", "dtype"]
    assert (first.split()[:3], second.split()[:3]) == (["A", "8", "fp32"], ["B", "2", "bf16"])


def test_wide_labels_of_points_at_the_edge_stay_inside_and_apart() -> None:
    frame = Box(0.0, 0.0, 400.0, 400.0)
    labels = [Label(30.0, 150.0 + i, 360.0, 18.0) for i in range(12)]
    boxes = place(labels, frame, points=[Box.around(30.0, 150.0 + i, 12, 12) for i in range(12)])
    assert all(b.x0 >= 0 and b.x1 <= 400 and b.y0 >= 0 and b.y1 <= 400 for b in boxes)
    rows = sorted(boxes, key=lambda box: box.y0)  # so wide that two side by side overlap
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(rows))


def test_a_leader_goes_a_long_way_rather_than_over_a_line() -> None:
    """Beside a corridor that leads down to a free place, and above a line with room behind it."""
    line = [(float(x), 200.0) for x in range(0, 401, 8)]
    taken = [Box(0, 60, 190, 195), Box(245, 60, 400, 195)]
    frame, label = Box(0, -200, 400, 400), Label(200.0, 190.0, 60.0, 18.0)
    (box,) = place([label], frame, taken=taken, line=line)
    assert box.y1 < 60
