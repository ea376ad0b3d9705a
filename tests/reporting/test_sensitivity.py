"""Elasticities, grids and explorations as they are asked for: in Python and on the command line."""

from __future__ import annotations

import csv
import io
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.studies.explaining import decode_forms
from rooftrace.studies.forms import Conditions
from tests.reporting.conftest import Run

MODEL = """
import torch
from torch import nn
def build(width=256):
    return nn.Linear(width, width), (torch.ones(8, width),)
"""
CONFIG = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64,
    "n_positions": 64,
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256,
    "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 1000,
    "max_position_embeddings": 4096, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def linear() -> tuple[nn.Module, torch.Tensor]:
    module = nn.Linear(256, 256).to("meta", torch.bfloat16)
    return module, torch.empty(8, 256, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def here(one_folder: Path) -> Path:
    pytest.importorskip("transformers")
    (one_folder / "t.py").write_text(MODEL)
    (one_folder / "config.json").write_text(json.dumps(CONFIG))
    return one_folder


# -- elasticities ----------------------------------------------------------------------------------


def test_a_module_is_asked_about_its_batch() -> None:
    result = rt.sensitivity(*linear())
    assert isinstance(result, rt.types.Elasticities)
    assert result.sizes == {"batch": 8}
    estimate = rt.estimate(*linear())
    assert (result.t_est, result.flops) == (estimate.t_est, estimate.flops)
    text = str(result)
    assert "chip.memory_bandwidth" in text
    assert "not read: " in text
    assert "chip.price" in text


def test_a_form_is_asked_by_its_sizes() -> None:
    module, x = linear()
    form = rt.tools.form(module, x, over={"batch": range(1, 33)})
    assert rt.sensitivity(form, batch=8).to_rows() == rt.sensitivity(module, x).to_rows()
    with pytest.raises(rt.types.RequestError, match="size 'batch' is missing"):
        rt.sensitivity(form)
    with pytest.raises(rt.types.RequestError, match="this form is over batch"):
        rt.sensitivity(form, batch=8, kv=3)


@pytest.mark.slow
def test_sizes_of_a_config_have_their_own_forms(here: Path) -> None:
    over = ("kv", "config.n_layer")
    result = rt.sensitivity("config.json", over=over, phase="decode", batch=4, kv=32)
    assert result.sizes == {"kv": 32, "config.n_layer": 2}
    flops = [
        rt.estimate("config.json", phase="decode", batch=4, kv=32, settings={"config.n_layer": n})
        .flops
        for n in (2, 3)
    ]  # fmt: skip
    slope = result.of("config.n_layer").flops
    assert slope is not None
    # Of so few layers no formula is proven: a finite step from 2 to 3.
    assert slope.finite
    assert slope.value == pytest.approx(math.log(flops[1] / flops[0]) / math.log(3 / 2))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"over": {"batch": 0}}, "expected a whole number of at least 1"),
        ({"over": ["kvv"]}, "say its value too"),
        ({"over": []}, "over is empty"),
        ({"over": ["config.n_layers"]}, "does not say it"),
        ({"response": "flops"}, "it is of a grid"),
        ({"grid": {}}, "the grid is empty"),
        ({"grid": [1]}, "expected levels by name"),
        ({"grid": {"batch": []}}, "the factor has no levels"),
        ({"grid": {"batch": 8}}, "expected levels, for example"),
        ({"grid": {"batch": ["x0.3"]}}, "expected whole numbers"),
        ({"grid": {"batch": ["many"]}}, "expected whole numbers"),
        ({"grid": {"batch+chip.clock": ["x2"]}}, "names that change together"),
        ({"grid": {"bacth": [1, 2]}}, "did you mean 'batch'"),
        ({"grid": {"chip.clokc": ["x2"]}}, "did you mean 'chip.clock'"),
        ({"grid": {"chip.clock": ["fast"]}}, "expected a number above 0"),
        ({"grid": {"config.n_layr": [2]}}, "did you mean 'n_layer'"),
        ({"grid": {"execution": ["eagr"]}}, "did you mean 'eager'"),
        ({"grid": {"chip": ["h201"]}}, "h201"),
        ({"grid": {"dtype": ["fp9"]}}, "fp9"),
    ],
)
def test_bad_input_is_told(here: Path, asked: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"phase": "decode", "batch": 2, "kv": 16, **asked}
    with pytest.raises((ValueError, LookupError), match=message):
        rt.sensitivity("config.json", **options)


# -- grids -----------------------------------------------------------------------------------------


def test_a_grid_over_a_config_is_estimates(here: Path) -> None:
    grid = {
        "batch": [1, 4],
        "config.n_layer": [1, 2],
        "config.n_embd+config.vocab_size": ["x0.5", "x1"],
        "execution": ["eager", "efficient"],
    }
    result = rt.sensitivity("config.json", grid=grid, phase="decode", kv=16, chip="l4")
    lines = result.frame().to_dict("records")
    assert len(lines) == 16
    for line in (lines[0], lines[5], lines[15]):
        share = float(line["config.n_embd+config.vocab_size"][1:])
        settings = {
            "config.n_layer": line["config.n_layer"],
            "config.n_embd": int(32 * share),
            "config.vocab_size": int(64 * share),
        }
        estimate = rt.estimate(
            "config.json", phase="decode", batch=line["batch"], kv=16, settings=settings,
            chip="l4", execution=line["execution"],
        )  # fmt: skip
        assert line["t_est"] == pytest.approx(estimate.t_est, rel=1e-9)
        assert line["flops"] == estimate.flops
    assert sum(effect.share for effect in result.effects.main) <= 1 + 1e-9


def test_the_seeds_knobs_are_factors() -> None:
    """WRF, fusion factors and B_sat of its preset."""
    grid = {
        "execution.weight_residency": ["x0.5", "x1"],
        "execution.activation_fusion": [0.5, 1],
        "execution.elementwise": [0.7, 1],
        "execution.utilization.b_sat": [16, 64],
        "batch": [1, 8],
    }
    module, x = linear()
    result = rt.sensitivity(module, x, grid=grid, execution="seed-efficient", response="t_bound")
    assert len(result) == 32
    assert result.effects.of("execution.elementwise").share == 0  # nothing temporary is moved
    assert result.effects.of("execution.weight_residency").share > 0


def test_a_keyword_of_a_function_is_a_factor(here: Path) -> None:
    result = rt.sensitivity("t.py:build", grid={"width": [128, 256]}, response="flops")
    low, high = result.effects.of("width").means
    assert (low, high) == (2 * 8 * 128**2 + 8 * 128, 2 * 8 * 256**2 + 8 * 256)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_what_the_call_gives(here: Path, run: Run) -> None:
    ran = run("sensitivity", "t.py:build", "--format", "csv")
    lines = list(csv.DictReader(io.StringIO(ran.out)))
    expected = rt.sensitivity("t.py:build")
    assert [line["name"] for line in lines] == [row.name for row in expected.rows]
    assert [float(line["t_est"] or 0) for line in lines] == [r.t_est or 0 for r in expected.rows]


def test_a_grid_goes_to_files_with_its_tornado(here: Path, run: Run) -> None:
    ran = run(
        "sensitivity", "t.py:build", "--grid", "batch=1,64", "--grid", "chip.clock=x0.5,x1",
        "--points", "points.csv", "-o", "effects.csv", "--plot", "tornado.png",
    )  # fmt: skip
    assert ran.code == 0
    effects = list(csv.DictReader((here / "effects.csv").open()))
    assert {effect["factors"] for effect in effects} == {
        "batch", "chip.clock", "batch x chip.clock",
    }  # fmt: skip
    assert len((here / "points.csv").read_text().splitlines()) == 1 + 4
    assert (here / "tornado.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grid", "batch"), "expected NAME=V1,V2"),
        (("--grid", "batch=1", "--grid", "batch=2"), "stands twice"),
        (("--over", "batch=two"), "expected a whole number"),
        (("--points", "p.csv"), "it is of a grid"),
        (("--phase", "forward,training"), "expected one phase"),
    ],
)
def test_a_wrong_command_ends_in_one_line(
    here: Path, run: Run, arguments: tuple[str, ...], message: str
) -> None:
    ran = run("sensitivity", "t.py:build", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert len(ran.err.strip().splitlines()) == 1


# -- explorations ----------------------------------------------------------------------------------


@cache
def experts(folder: Path) -> rt.types.Form:
    (folder / "experts.json").write_text(json.dumps(EXPERTS))
    over = {"batch": range(1, 4097), "kv": range(64, 513)}
    return rt.tools.form(folder / "experts.json", over=over, phase="decode")


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> rt.types.Form:
    pytest.importorskip("transformers")
    return experts(tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize(
    ("batch", "kv", "execution"),
    [
        (1, 64, "serving"),
        (8, 100, "efficient"),
        (300, 512, "serving"),
        pytest.param(1, 64, "efficient", marks=pytest.mark.heavy),
        pytest.param(8, 100, "serving", marks=pytest.mark.heavy),
        pytest.param(300, 512, "efficient", marks=pytest.mark.heavy),
    ],
)
def test_flops_and_bytes_of_an_exploration_are_those_of_an_estimate(
    routed: rt.types.Form, execution: str, batch: int, kv: int
) -> None:
    totals = decode_forms.FormTotals(routed, Conditions.of(execution, "fp8"))
    step = decode_forms.decode_step(totals)
    own = decode_forms.experts_of(totals, 1, 64)
    assert own.experts == 16
    b, n = np.array([float(batch)]), np.array([float(kv)])
    flops = step.flops(b, n) + own.flops(b, 1)
    size = step.kv_bytes(b, n) + step.other_bytes(b, n) + step.weight_bytes + own.bytes(b, 1)
    estimate = routed.estimate("h200-sxm", execution, "fp8", batch=batch, kv=kv)
    assert int(flops[0]) == estimate.flops
    assert int(size[0]) == estimate.bytes_hbm
    assert int(step.kv_bytes(b, n)[0]) == estimate.bytes.kv


def test_experts_shared_by_devices_are_counted_as_a_loop_does(routed: rt.types.Form) -> None:
    totals = decode_forms.FormTotals(routed, Conditions.of("serving", "fp8"))
    own = decode_forms.experts_of(totals, 1, 64)
    batch = np.array([32.0])
    calls = 2 * 32 * 2  # layers, tokens, experts of each
    # Gate, up and down; the kernel of the last product weighs its rows, too.
    assert own.flops(batch, 4)[0] == calls * (6 * 128 * 64 + 128)
    for devices in (1, 2, 4):
        weights = 0.0
        for _ in range(2):  # layers
            missed = 1.0
            for _ in range(32 * devices):
                missed *= 1 - 2 / 16
            weights += 16 / devices * (1 - missed) * 3 * 128 * 64
        assert own.bytes(batch, devices)[0] == pytest.approx(weights, rel=1e-5)  # whole bytes
        away = (devices - 1) / devices
        sent = 2 * 32 * 2 * 128 * 2 * away  # to experts and back, a byte for each number
        assert own.link_bytes(batch, devices)[0] == pytest.approx(sent)


@pytest.mark.slow
def test_the_least_batch_is_the_least(routed: rt.types.Form) -> None:
    asked: dict[str, Any] = {"devices": [1, 4], "kv": [64, 512]}
    result = rt.tools.explore(
        routed, over=asked, dtype="fp8", chip="l4", alpha=0.01, link="50 GB/s"
    )
    assert [(cell.devices, cell.kv) for cell in result.cells] == [
        (1, 64), (1, 512), (4, 64), (4, 512),
    ]  # fmt: skip
    some = [cell for cell in result.cells if cell.batch is not None and cell.batch > 1]
    assert some
    around = sorted({cell.batch - less for cell in some for less in (0, 1)})
    both = rt.tools.explore(
        routed, over={**asked, "batch": around}, dtype="fp8", chip="l4", alpha=0.01, link="50 GB/s"
    )
    # One less does not reach it.
    assert [cell for cell in both.cells if cell.batch is not None and cell.batch > 1] == some


@pytest.mark.slow
def test_an_exploration_is_shown_and_drawn(routed: rt.types.Form, tmp_path: Path) -> None:
    over = {"devices": "1,4", "kv": [64]}
    plot = tmp_path / "field.png"
    result = rt.tools.explore(routed, over=over, dtype="fp8", chip="l4", link=1e9, plot=plot)
    assert "16 routed experts in a layer" in str(result)
    assert len(result.to_rows()) == 2
    assert json.loads(json.dumps(result.to_dict()))["cells"][0]["devices"] == 1
    assert (tmp_path / "field.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"over": {"device": [1]}}, "did you mean 'devices'"),
        ({"over": {"kv": []}}, "the range is empty"),
        ({"over": {"devices": [32], "kv": [64]}}, "16 experts are on that many"),
        ({"over": {"devices": [1], "kv": [64]}, "alpha": 0}, "alpha=0"),
        ({"link": "fast"}, "expected a quantity in byte/s"),
        ({"link": -1.0}, "expected byte/s above 0"),
        ({"over": {"devices": [2], "kv": [64]}, "chip": "epyc-9654"}, "."),
    ],
)
def test_an_exploration_of_nothing_is_told(
    routed: rt.types.Form, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, LookupError), match=message):
        rt.tools.explore(routed, **asked)


@pytest.mark.slow
def test_a_step_without_experts_is_for_one_device(here: Path) -> None:
    form = rt.tools.form(
        "config.json", over={"batch": range(1, 9), "kv": range(8, 17)}, phase="decode"
    )
    over = {"devices": [1], "kv": [16], "batch": [1, 8]}
    assert rt.tools.explore(form, over=over).experts == 1
    with pytest.raises(RequestError, match="no products of routed experts"):
        rt.tools.explore(form, over={**over, "devices": [2]})


@pytest.mark.slow
def test_lengths_and_devices_that_nobody_says_are_those_of_the_model(tmp_path: Path) -> None:
    sizes = {"n_positions": 65, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    result = rt.tools.explore(tmp_path / "config.json", over={"batch": [1, 8]})
    assert [(cell.devices, cell.kv) for cell in result.cells] == [(1, kv) for kv in (8, 16, 32, 64)]
    assert "no routed experts in a layer" in str(result)
    with pytest.raises(rt.types.RequestError, match="a position table of 65 entries"):
        rt.tools.explore(tmp_path / "config.json", over={"batch": [1, 8], "kv": [128]})
