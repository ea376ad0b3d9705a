"""Bytes that a last-level cache holds, by a form, beside single estimates with the same knobs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import evaluated


def wide(batch: int = 2) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        parts = [nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024))
                 for _ in range(5)]  # fmt: skip
        return nn.Sequential(*parts), torch.empty(batch, 128, 1024)


@cache
def step(batch: int) -> rt.types.OpGraph:
    return rt.trace(*wide(batch))


@cache
def form() -> rt.types.Form:
    model, x = wide()
    return rt.tools.form(model, x, over={"0.0": range(2, 65)})


@pytest.mark.parametrize("execution", ["eager", "efficient"])
@pytest.mark.parametrize("megabytes", [0.02, 0.3, 60])
def test_a_cache_holds_as_much_by_a_form_as_by_a_walk(execution: str, megabytes: float) -> None:
    chip = rt.load_chip("h200-sxm")
    assert chip.l2_capacity is not None
    chip = replace(chip, l2_capacity=replace(chip.l2_capacity, value=megabytes * 1e6))
    known = rt.tools.execution_model(execution)
    knobs = known.knobs_on(chip)
    assert knobs is not None
    cached = replace(known, knobs=replace(knobs, cache=4.0))
    sizes = np.array([2, 7, 16, 33, 64])
    table = evaluated(form(), Points({"0.0": sizes}), [chip], Conditions(cached))
    uncached = Conditions(replace(known, knobs=knobs))
    cold = evaluated(form(), Points({"0.0": sizes}), [chip], uncached)
    for place, size in enumerate(sizes):
        told = rt.estimate(step(int(size)), chip=chip, execution=cached).t_est
        assert table["t_est"][place] == pytest.approx(told, rel=1e-12)
    if megabytes == 60 and execution == "efficient":
        assert (table["t_est"] < cold["t_est"]).any()  # it matters


def test_layers_as_a_size_are_refused_with_such_knobs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=128)
    path = tmp_path / "config.json"
    config.to_json_file(path, use_diff=False)
    layers = range(6, 16)
    form = rt.tools.form(str(path), phase="prefill", seq=32, over={"config.n_layer": layers})
    known = rt.tools.execution_model("efficient")
    chip = rt.load_chip("h200-sxm")
    knobs = known.knobs_on(chip)
    assert knobs is not None
    cached = replace(known, knobs=replace(knobs, cache=4.0))
    with pytest.raises(RequestError, match="number of layers"):
        evaluated(form, Points({"config.n_layer": layers}), [chip], Conditions(cached))
