"""Guidance: each what-if is what the same options of the user give, and nothing idle is listed."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import REWRITES
from rooftrace.costmodels.kernels.tiles import matrix_engine
from rooftrace.graph.graph import OpGraph
from rooftrace.studies.advice.whatifs import ACTIONS, LEAST, LEVERS, WhatIf
from tests.costmodels.tile_support import tile_efficiency

CHIP = "h200-sxm"


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> OpGraph:
    """A decode step like Llama's, with a cache long enough to matter."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    graphs = rt.tools.priced_graphs(
        str(folder / "config.json"), phases=["decode"], batch=32, kv=4096
    )
    return graphs["decode"]


@pytest.fixture(scope="module")
def convolutions() -> OpGraph:
    """A training step like a residual network's, in fp32."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(64, 64, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(64)
            self.second = nn.Conv2d(64, 64, 3, padding=1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(self.norm(self.first(x)).relu())

    with torch.device("meta"):
        model = nn.Sequential(*[Residual() for _ in range(2)])
        x = torch.empty(256, 64, 56, 56)
    return rt.trace(model, x, phase="training")


@pytest.fixture(scope="module")
def small() -> OpGraph:
    """A net of kernels so short that the host is always late."""
    with torch.device("meta"):
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return rt.trace(nn.Sequential(*layers).bfloat16(), torch.empty(8, 64).bfloat16())


def by_options(graph: OpGraph, execution: str, option: str) -> rt.types.Estimate:
    """The step as a user gets it who types these options; nothing here knows of guidance."""
    prices = {
        name: value
        for name in ("dtype", "weights_dtype", "kv_dtype")
        for value in re.findall(rf"--{name.replace('_', '-')} (\S+)", option)
    }
    model = rt.tools.execution_model(execution)
    for preset in re.findall(r"--execution (\S+)", option):
        model = rt.tools.execution_model(preset)
    for names in re.findall(r"--rewrite (\S+)", option):
        model = rt.tools.execution_model(model, rewrites=tuple(names.split(",")))
    if "--tf32" in option:
        model = rt.tools.execution_model(model, tf32=True)
    for call in re.findall(r"execution_model\(.*\)", option):
        changed = eval(call, {"execution_model": rt.tools.execution_model})
        model = replace(changed, rewrites=model.rewrites, tf32=model.tf32)
    source = rt.tools.reprice(graph, **prices) if prices else graph
    return rt.estimate(source, chip=CHIP, execution=model)


_known: dict[tuple[int, str, str], rt.types.Guidance] = {}


def guidance_of(graph: OpGraph, execution: str, chip: str = CHIP) -> rt.types.Guidance:
    """What would help a step of this module, which is asked for once."""
    key = id(graph), execution, chip
    if key not in _known:
        _known[key] = rt.tools.guidance(graph, chip, execution)
    return _known[key]


STEPS = [
    ("decode", "efficient"),
    ("decode", "naive"),
    ("decode", "eager"),
    ("decode", "compiled"),
    ("decode", "serving"),
    ("convolutions", "eager"),
    ("convolutions", "efficient"),
    ("small", "eager"),
    ("small", "compiled"),
]


@pytest.fixture(scope="module", params=STEPS, ids="-".join)
def guided(request: pytest.FixtureRequest) -> tuple[OpGraph, str, rt.types.Guidance]:
    """A step, how it is run, and what would help it."""
    name, execution = request.param
    graph = request.getfixturevalue(name)
    return graph, execution, rt.tools.guidance(rt.estimate(graph, chip=CHIP, execution=execution))


def test_every_what_if_is_what_the_options_of_a_user_give(
    guided: tuple[OpGraph, str, rt.types.Guidance],
) -> None:
    graph, execution, told = guided
    step = told.step
    assert told.options, "something helps each of these"
    for what_if in (*told.options, *([told.together] if told.together else [])):
        if not what_if.option:
            continue  # code changes: tests/reporting/test_planted.py
        if what_if.lever == "kernels":
            expected = rt.tools.headroom(step).beyond
        else:
            expected = by_options(graph, execution, what_if.option)
        assert what_if.t_after == expected.t_est, what_if
        assert what_if.after.bytes_hbm == expected.bytes_hbm, what_if
        assert what_if.peak == expected.memory.peak, what_if
        assert what_if.t_before == step.t_est
        assert what_if.gain == step.t_est - expected.t_est


def test_they_stand_by_gain_and_save_a_hundredth_of_the_step(
    guided: tuple[OpGraph, str, rt.types.Guidance],
) -> None:
    *_, told = guided
    gains = [what_if.gain for what_if in told.options]
    assert gains == sorted(gains, reverse=True)
    assert all(gain >= LEAST * told.step.t_est for gain in gains)
    assert {what_if.lever for what_if in told.options} <= set(LEVERS) - {"together"}
    if told.together is not None:
        assert told.together.lever == "together"
        assert told.together.t_after < told.step.t_est


def levers(graph: OpGraph, execution: str) -> list[str]:
    return [what_if.lever for what_if in guidance_of(graph, execution).options]


def test_where_the_host_is_late_launching_as_one_graph_acts_on_launches(small: OpGraph) -> None:
    for execution in ("eager", "compiled"):
        told = guidance_of(small, execution)
        (launch,) = [what_if for what_if in told.options if what_if.lever == "launch"]
        assert launch.acts_on == "launch"
        assert launch.after.times.t_launch < launch.before.times.t_launch
    assert "launch" not in levers(small, "efficient")


def test_a_long_cache_is_worth_storing_in_fewer_bits(decode: OpGraph) -> None:
    told = guidance_of(decode, "efficient")
    cache = next(what_if for what_if in told.options if what_if.lever == "cache")
    weights = next(what_if for what_if in told.options if what_if.lever == "weights")
    # 32 sequences of 4,096 positions, 4 layers, keys and values of 2,048 numbers, one byte less
    positions = 32 * 4096 * 4 * 2 * 2048
    saved = cache.before.bytes_hbm - cache.after.bytes_hbm
    assert saved == pytest.approx(positions, rel=0.01)
    assert cache.gain > weights.gain and cache.acts_on == "hbm"
    assert cache.at_most and "accuracy is not checked" in cache.needs


def test_all_together_is_priced_and_is_not_the_sum(decode: OpGraph) -> None:
    told = guidance_of(decode, "naive")
    together = told.together
    assert together is not None
    parts = [what_if for what_if in told.options if what_if.lever != "kernels"]
    assert together.gain != pytest.approx(sum(what_if.gain for what_if in parts), rel=1e-3)
    assert together.gain > max(what_if.gain for what_if in parts)
    assert together.at_most == any(what_if.at_most for what_if in parts)


def test_what_is_done_is_not_listed_again(decode: OpGraph) -> None:
    assert not {"attention", "fusion", "launch"} & set(levers(decode, "efficient"))
    assert not {"attention", "fusion", "launch", "rewrite"} & set(levers(decode, "serving"))


def test_rewrites_are_of_inference(convolutions: OpGraph, decode: OpGraph) -> None:
    assert "rewrite" not in levers(convolutions, "eager")
    assert {*ACTIONS, "written-attention"} == set(REWRITES)
    alone = rt.tools.execution_model("efficient", kv_append="as-run")
    options = [what_if.option for what_if in rt.tools.guidance(decode, CHIP, alone).options]
    assert "--rewrite static-cache" in options


def test_a_training_step_is_told_autocast_and_nothing_narrower(convolutions: OpGraph) -> None:
    told = guidance_of(convolutions, "eager")
    actions = [what_if.action for what_if in told.options if what_if.lever == "compute"]
    assert "Run the step under torch.autocast in bf16" in actions
    assert "--dtype" not in " ".join(what_if.option for what_if in told.options)
    narrow = rt.tools.guidance(rt.tools.reprice(convolutions, dtype="bf16"), CHIP, "eager")
    assert not {"weights", "cache", "compute"} & {what_if.lever for what_if in narrow.options}


def test_convolutions_are_told_nothing_under_16_bits() -> None:
    """PyTorch has no kernel of convolutions in fp8, nor one whose weights are narrower."""
    with torch.device("meta"):
        layers = [nn.Conv2d(256, 256, 3, padding=1) for _ in range(3)]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
        image = torch.empty(64, 256, 56, 56, dtype=torch.bfloat16)
        graph = rt.trace(model.bfloat16(), image)
        product = rt.trace(nn.Linear(8192, 8192).bfloat16(), image.new_empty(64, 8192))
    told, others = (
        [option.action for option in guidance_of(step, "eager").options]
        for step in (graph, product)
    )
    assert told and not any("fp8" in action for action in told)
    assert any("fp8" in action for action in others)


def test_a_chip_without_a_rate_is_not_told_to_use_it(decode: OpGraph) -> None:
    told = guidance_of(decode, "efficient", "a100-sxm-80")
    assert not [what_if for what_if in told.options if what_if.lever == "compute"]
    assert [what_if for what_if in told.options if what_if.lever == "weights"]
    here = guidance_of(decode, "efficient")
    assert [what_if for what_if in here.options if what_if.lever == "compute"]


def test_nothing_is_listed_where_nothing_applies() -> None:
    with torch.device("meta"):
        product = nn.Linear(8192, 8192, bias=False).bfloat16()
        graph = rt.trace(product, torch.empty(8192, 8192).bfloat16(), phase="training")
    told = rt.tools.guidance(graph, "a100-sxm-80", "efficient")
    assert told.options == () and told.together is None
    assert str(told) == "no modelled change saves 1 % or more of the step"


def test_a_step_without_kernels_has_no_guidance() -> None:
    told = rt.tools.guidance(rt.trace(nn.Identity(), torch.empty(2)), CHIP)
    assert told.options == ()


def test_weights_that_are_narrow_already_are_left_alone(decode: OpGraph) -> None:
    narrow = rt.tools.reprice(decode, weights_dtype="fp8")
    told = rt.tools.guidance(narrow, CHIP, "efficient")
    assert "weights" not in {what_if.lever for what_if in told.options}
    cache = next(what_if for what_if in told.options if what_if.lever == "cache")
    both = rt.tools.reprice(decode, weights_dtype="fp8", kv_dtype="fp8")
    assert cache.t_after == rt.estimate(both, CHIP).t_est


def test_weights_that_a_checkpoint_declares_are_not_changed_by_another_change(
    decode: OpGraph,
) -> None:
    declared = decode.replace(workload={**decode.workload, "declared_weights_dtype": "fp8"})
    told = rt.tools.guidance(declared, CHIP, "efficient")
    cache = next(what_if for what_if in told.options if what_if.lever == "cache")
    assert cache.after.bytes.weights == cache.before.bytes.weights


def test_guidance_as_a_frame_and_as_text(decode: OpGraph) -> None:
    told = guidance_of(decode, "efficient")
    frame = told.to_frame()
    assert list(frame.columns) == WhatIf.KEYS.split()
    assert len(frame) == len(told.options) + (told.together is not None)
    assert str(told).startswith(f"1. {told.options[0].action}: ")
    assert "first: " in repr(told)


def test_a_padded_product_takes_no_fewer_tiles() -> None:
    """Why a what-if pads a size to whole loads and no further: by tiles it cannot gain."""
    chip = rt.load_chip(CHIP)
    engine, rate = matrix_engine(chip), chip.peak("matrix", "bf16")
    assert engine is not None
    for rows, columns, inner in ((8184, 50257, 768), (8, 50257, 768), (250, 1000, 2048)):
        wide = -(-columns // 128) * 128
        times = [
            rows * size * inner / tile_efficiency((rows, size, inner), engine, rate)
            for size in (columns, wide)
        ]
        assert times[0] <= times[1] * (1 + 1e-9)


def test_what_only_a_condition_of_the_host_reads_goes_with_it():
    class Checked(nn.Module):
        def __init__(self, checks: bool) -> None:
            super().__init__()
            self.checks, self.layer = checks, nn.Linear(512, 512)

        def forward(self, x):
            y = self.layer(x)
            if self.checks and not torch.isfinite(y).all():
                raise FloatingPointError
            return y.relu()

    def step(checks: bool):
        with torch.device("meta"):
            graph = rt.trace(Checked(checks), torch.empty(4096, 512))
        return rt.estimate(graph, "h100-sxm", "eager")

    planted, mended = step(True), step(False)
    (told,) = (w for w in rt.tools.guidance(planted).options if "conditions" in w.action)
    assert told.after.kernels == mended.kernels and told.t_after == mended.t_est
