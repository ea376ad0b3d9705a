"""The terminal: everything on one screen, whatever its width."""

from dataclasses import replace

import pytest

from rooftrace.hardware.units import format_time
from rooftrace.reporting.renderers import words
from rooftrace.reporting.views.results import as_text, renderable
from tests.costmodels.batch_support import times_of_kernels
from tests.reporting.report_support import ROPE, made_report


def test_three_phases_fit_one_screen():
    lines = str(made_report()).splitlines()
    assert len(lines) <= 43
    assert max(len(line) for line in lines) <= 100


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width):
    for report in (made_report(), made_report("tiny", phases=("forward",))):
        assert max(len(line) for line in as_text(report, width).splitlines()) <= width


def test_every_chip_has_a_row_in_every_phase():
    report = made_report(chips=("h200-sxm", "b200-sxm", "l4"))
    for width in (100, 60):
        lines = as_text(report, width).splitlines()
        assert max(map(len, lines)) <= width
        for chip in report.chips:
            rows = [line for line in lines if line.startswith(f"  {chip.name} ")]
            assert len(rows) == len(report.phases)
            for phase, row in zip(report.phases, rows, strict=True):
                one = report.estimate(phase, chip=chip.name)
                assert format_time(one.t_est) in row
                assert f"no: {report.memory[phase].chips_needed(chip):,} chips" in row
    assert "chips, efficient" in lines[0] or any(line.startswith("chips, eff") for line in lines)
    alone = made_report(chips=("h200-sxm",))
    assert "chips, efficient" not in str(alone)


def test_the_first_chip_is_the_detailed_one():
    both, alone = (made_report(chips=chips) for chips in (("h200-sxm", "h100-sxm"), ("h200-sxm",)))
    rest = [line for line in str(both).splitlines() if line not in str(alone).splitlines()]
    assert len(rest) == 1 + 3 * 2, "the head of the table and a row for each phase and chip"


def test_what_matters_survives_a_narrow_terminal():
    text = as_text(made_report(), 60)
    for word in ("expected", "limited by", "HBM", "do not fit", "coverage:", "module"):
        assert word in text


def test_misfit_comes_before_the_numbers_in_bold_red():
    from rich.console import Console

    console = Console(
        width=100, force_terminal=True, color_system="standard", record=True, file=None
    )
    with console.capture() as capture:
        console.print(renderable(made_report()))
    text = capture.get()
    assert text.index("671.0 GB of weights do not fit one") < text.index("expected")
    assert "\x1b[1;31m" in text[: text.index("expected")]


def test_numbers_of_chips_are_grouped():
    report = made_report()
    chip = report.chips[0]
    training, decode = (report.memory[phase].chips_needed(chip) for phase in ("training", "decode"))
    _, sentence = words.fit_words(report.memory, chip)
    needs = f"training needs {training} chips and prefill and decode need {decode} chips."
    assert needs in sentence


def test_what_fits_says_so_calmly():
    text = str(made_report("tiny", phases=("forward",)))
    assert "Fits one" in text
    assert "not fit" not in text


def test_compute_bound_and_memory_bound_calls_of_one_op_have_rows_of_their_own():
    text = str(made_report(phases=("decode", "prefill")))
    rows = [line.split() for line in text.splitlines() if line.startswith("  mm ")]
    assert {row[1] for row in rows} == {"HBM", "compute"}


def test_coverage_is_always_said():
    complete = str(made_report())
    ops = sum(
        one.coverage.ops
        for _, execution, one in made_report().of_first_chip()
        if execution == "efficient"
    )
    assert f"coverage: {ops:,} of {ops:,} ops have a rule, 100 % of bytes" in complete
    assert "assumptions: 1 balanced-routing, 1 loss;" in complete


def test_an_op_without_a_rule_is_named_with_its_stub():
    text = str(made_report(unsupported=(ROPE,)))
    assert "no rule: mylib.rope.default x24" in text
    assert '@rooftrace.extend.rule("mylib.rope")' in text
    assert "100 % of bytes" not in text


def test_waiting_for_the_host_is_a_row():
    text = str(made_report("tiny", phases=("forward",), executions=("naive",)))
    assert "waiting for the host" in text


def test_one_estimate_prints_without_a_report():
    one = made_report().estimate("decode")
    text = as_text(one)
    assert "decode" in text
    assert "training" not in text
    assert "coverage:" in text


def test_shares_of_the_kernels_sum_to_the_step():
    one = made_report("tiny", phases=("forward",)).estimate("forward")
    seconds = sum(row.timing.t_device for row in one.rows) + one.times.t_launch
    assert seconds == pytest.approx(one.t_est)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0%"),
        (0.004, "<1%"),
        (0.006, "1%"),
        (0.31, "31%"),
        (0.999, ">99%"),
        (1, "100%"),
        (4.77, "477%"),
        (71.6, "72x"),
        (None, "–"),
    ],
)
def test_percent(share, text):
    assert words.percent(share) == text


def test_regime_words_leave_out_a_next_one_that_takes_nothing():
    times = made_report("tiny", phases=("forward",)).estimate("forward").times
    assert words.regime_words(times).startswith("launch")
    assert words.regime_words(times_of_kernels([], end=1.0)) == "launch 100%"


@pytest.mark.parametrize(
    ("path", "width", "short"),
    [("", 10, ""), ("lm_head", 10, "lm_head"), ("model.layers.*.mlp.experts", 14, "…mlp.experts"),
     ("averyveryverylongname", 8, "…ongname"), ("activations.py:103", 12, "…ions.py:103")],
)  # fmt: skip
def test_short_module(path, width, short):
    assert words.short_module(path, width) == short
    assert len(short) <= width


def test_stub_of_every_unknown_op_is_in_the_page_not_on_the_screen():
    many = tuple(replace(ROPE, target=f"mylib.op{i}.default", count=1, bytes=10) for i in range(6))
    text = str(made_report(phases=("decode",), unsupported=many))
    assert text.count("no rule:") == 3
    assert "3 more ops" in text
