"""Arguments of calls: each is honoured, or refused with the nearest right name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import UnusedError

pytestmark = pytest.mark.usefixtures("kept_targets")


class Open(nn.Module):
    """Takes whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        return self.fc(x)


class Named(Open):
    """Takes an argument of a name that rooftrace has too."""

    def forward(self, x: torch.Tensor, batch: int = 1) -> torch.Tensor:  # type: ignore[override]
        return self.fc(x) * batch


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


@pytest.fixture
def of(tmp_path: Path) -> SimpleNamespace:
    """One layer in every form that a source can have."""
    (tmp_path / "t.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(8, 8), (torch.ones(2, 8),)\n"
    )
    (tmp_path / "steps.csv").write_text("model,batch,ms\nbuild,2,1\n")
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    graph = rt.trace(model, x)
    rt.save(graph, tmp_path / "g.json")
    return SimpleNamespace(
        model=model,
        x=x,
        graph=graph,
        saved=tmp_path / "g.json",
        target=f"{tmp_path}/t.py:build",
        table=tmp_path / "steps.csv",
        template=f"{tmp_path}/t.py:{{target}}",
    )


CONFIG = {
    "dtype": "float32",
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 256,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A language model of one small layer."""
    import json

    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config.json"


@pytest.mark.slow
def test_sizes_of_a_target_are_honoured_by_every_call(config: Path) -> None:
    sizes: dict[str, Any] = {"batch": 3, "seq": 16}
    assert rt.report(config, phases=["prefill"], **sizes).workload["items"] == 3 * 16
    assert rt.trace(config, **sizes).workload["items"] == 3 * 16
    assert (
        rt.tools.trace_target(config, ["prefill"], **sizes)["prefill"].workload["items"] == 3 * 16
    )
    assert rt.estimate(config, phase="prefill", **sizes).graph.workload["items"] == 3 * 16
    assert rt.summary(config, **sizes).graph.workload["items"] == 3 * 16
    one, two = (
        rt.diff(config, config, phases="prefill", batch=b, seq=16).phases[0].totals["flops"].before
        for b in (1, 2)
    )
    assert two == 2 * one
    counted = [
        rt.compare(config, peers=["flopcounter"], phases=["prefill"], batch=b) for b in (1, 2)
    ]
    assert counted[1][0].flops_matrix == 2 * counted[0][0].flops_matrix
    fits = rt.largest_batch(config, chip="l4", phases=["prefill"], seq=16)["prefill"]["l4"]
    assert (
        fits.batch
        > rt.largest_batch(config, chip="l4", phases=["prefill"], seq=256)["prefill"]["l4"].batch
    )


def test_a_hugging_face_model_is_given_inputs_of_the_sizes(config: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.parent))
    assert rt.report(model, batch=3, seq=16, phases=["prefill"]).workload["items"] == 3 * 16
    with pytest.raises(UnusedError, match="batch=3: the arguments of the call have their sizes"):
        rt.trace(model, input_ids=torch.zeros(1, 8, dtype=torch.int64), batch=3)


def test_every_source_is_estimated(of: SimpleNamespace) -> None:
    sources = ((of.model, of.x), (of.graph,), (of.saved,), (str(of.saved),), (of.target,))
    flops = {
        rt.estimate(*source, chip="l4").flops for source in (*sources, ({"forward": of.graph},))
    }
    assert flops == {2 * 2 * 8 * 8 + 2 * 8}  # the product, and its bias
    assert rt.estimate(of.graph, "l4", "eager").chip.name == "l4"
    assert rt.estimate(rt.plan(of.graph), "l4").chip.name == "l4"
    assert rt.estimate(step, of.model, of.x).graph.phase == "forward"
    assert list(rt.report(step, of.model, of.x).graphs) == ["forward"]


def test_what_forward_names_is_forwards(of: SimpleNamespace) -> None:
    doubled, plain = (rt.trace(Named(), of.x, batch=b) for b in (2, 1))
    assert doubled.workload["batch"] == plain.workload["batch"] == 2, "the rows of x"
    assert rt.trace(Open(), of.x, anything=3).workload["batch"] == 2
    tensor = rt.trace(Open(), of.x, batch=of.x)  # what is a tensor is the model's
    assert len(tensor.ops) == len(plain.ops) or tensor.ops


class Phased(Open):
    """Takes an argument that some of our calls have by name."""

    def forward(self, x: torch.Tensor, dtype: str = "") -> torch.Tensor:  # type: ignore[override]
        return self.fc(x)


def test_what_a_call_of_ours_has_by_name_is_ours(of: SimpleNamespace) -> None:
    graph = rt.report(Phased(), of.x, dtype="bf16", phases=["forward"]).graphs["forward"]
    assert {value.dtype for value in graph.values if value.role == "weights"} == {"bf16"}


def test_the_habits_price_in_other_precisions_too(of: SimpleNamespace) -> None:
    halves = rt.profile(of.model, (of.x,), dtype="bf16").estimate
    assert halves.bytes.weights == 2 * (8 * 8 + 8)  # bf16 weight and bias
    assert halves.bytes.activations == 2 * (2 * 8 + 2 * 8)  # bf16 x and result
    assert rt.summary(of.model, (2, 8), dtype="bf16").bytes == halves.bytes


Ask = Callable[[SimpleNamespace], Any]

REFUSED: dict[str, tuple[Ask, str]] = {
    "misspelt size": (lambda of: rt.report(of.model, of.x, bacth=3), "did you mean 'batch'"),
    "misspelt size, open forward": (
        lambda of: rt.report(Open(), of.x, bacth=3),
        "did you mean 'batch'",
    ),
    "chips": (lambda of: rt.report(of.model, of.x, chips="h100"), "did you mean 'chip'"),
    "chips of a target": (lambda of: rt.report(of.target, chips="h100"), "did you mean 'chip'"),
    "chips of a graph": (lambda of: rt.report(of.graph, chips="h100"), "did you mean 'chip'"),
    "argument of the forward": (lambda of: rt.trace(of.model, inptu=of.x), "did you mean 'input'"),
    "diff": (lambda of: rt.diff(of.model, of.model, of.x, chipp="l4"), "did you mean 'chip'"),
    "compare": (lambda of: rt.compare(of.model, of.x, peer="fvcore"), "did you mean 'peers'"),
    "estimate": (lambda of: rt.estimate(of.model, of.x, execuiton="eager"), "mean 'execution'"),
    "trace": (lambda of: rt.trace(of.model, of.x, optimiser="sgd"), "did you mean 'optimizer'"),
    "trace_target": (lambda of: rt.tools.trace_target(of.target, bacth=3), "did you mean 'batch'"),
    "largest": (lambda of: rt.largest_batch(of.target, chips="l4"), "did you mean 'chip'"),
    "summary": (lambda of: rt.summary(of.model, (2, 8), chp="l4"), "did you mean 'chip'"),
    "profile": (
        lambda of: rt.profile(of.model, (of.x,), chip="l4"),
        r"profile\(chip='l4'\): no such",
    ),
    "validate": (
        lambda of: rt.validate(of.table, "l4", target=of.template, knbs="x"),
        "did you mean 'knobs'",
    ),
    "calibrate": (
        lambda of: rt.calibrate(of.table, "l4", target=of.template, stat="x"),
        "did you mean 'start'",
    ),
    "sizes of a table": (
        lambda of: rt.validate(of.table, "l4", target=of.template, batch=3),
        "batch=3: this is for a trace; .* says itself what ran",
    ),
    "size of a graph": (
        lambda of: rt.report(of.graph, batch=3),
        "batch=3: .* has its sizes",
    ),
    "size of a saved graph": (lambda of: rt.diff(of.saved, of.saved, batch=3), "has its sizes"),
    "size of a saved target": (
        lambda of: rt.tools.trace_target(of.saved, request=rt.types.Request(batch=3)),
        "a graph has its sizes",
    ),
    "optimizer of a graph": (lambda of: rt.report(of.graph, optimizer="sgd"), "traced already"),
    "size beside tensors": (lambda of: rt.report(of.model, of.x, batch=3), "the arguments of the"),
    "size of a step": (lambda of: rt.report(step, of.model, of.x, batch=3), "a step of your own"),
    "arguments of a target": (lambda of: rt.report(of.target, of.x), "pass sizes by name"),
    "sequence of a target": (lambda of: rt.trace(of.target, seq=4), "makes its own inputs"),
    "weights of a trace": (
        lambda of: rt.trace(of.target, weights_dtype="fp8"),
        "price it in others",
    ),
    "optimizer without training": (
        lambda of: rt.trace(of.model, of.x, optimizer="sgd"),
        "optimizer='sgd': it is for training, and this is forward",
    ),
    "cache that is not there": (
        lambda of: rt.report(of.target, kv_dtype="fp8"),
        "no cache is kept",
    ),
    "remote code of a file": (lambda of: rt.trace(of.target, trust_remote_code=True), "as it is"),
    "batch that is looked for": (lambda of: rt.largest_batch(of.target, batch=3), "looked for"),
    "no inputs": (lambda of: rt.estimate(of.model), "missing a required argument: 'input'"),
    "no inputs but a size": (lambda of: rt.trace(of.model, batch=3), r"inputs=\{\"x\": \"8,3"),
    "chip by place": (lambda of: rt.estimate(of.model, of.x, "h100"), "say chip= for the chip"),
    "phase twice": (lambda of: rt.report(of.target, phase="forward", phases=["training"]), "same"),
    "size in letters": (lambda of: rt.report(of.target, batch="many"), "expected a whole number"),
    "module to memory": (lambda of: rt.memory(of.model), "memory: expected an OpGraph, got Linear"),
    "module to plan": (lambda of: rt.plan(of.model), "plan: expected an OpGraph, got Linear"),
    "module to reprice": (
        lambda of: rt.tools.reprice(of.model, "fp8"),
        "reprice: expected an OpGraph",
    ),
    "module to headroom": (
        lambda of: rt.tools.headroom(of.model),
        "expected an OpGraph, got Linear",
    ),
    "cache that a graph has not": (
        lambda of: rt.estimate(of.graph, kv_dtype="fp8"),
        "no cache is kept",
    ),
    "cache that no side has": (
        lambda of: rt.diff(of.target, of.target, kv_dtype="fp8"),
        "no cache is kept",
    ),
    "remote code of two files": (
        lambda of: rt.diff(of.target, of.target, trust_remote_code=True),
        "as it is",
    ),
    "no phases": (lambda of: rt.report(of.target, phases=()), r"phases=\(\): expected some of"),
    "number for phases": (lambda of: rt.report(of.target, phases=3), "phases=3: expected some"),
    "three names": (
        lambda of: rt.diff(of.graph, of.graph, names=("a", "b", "c")),
        "expected two",
    ),
    "truth in letters": (lambda of: rt.trace(of.model, of.x, repeats="no"), "True or False"),
    "assumption in letters": (
        lambda of: rt.trace(of.model, of.x, assume="branch=true"),
        "values by kind",
    ),
    "class of an optimizer": (
        lambda of: rt.trace(of.model, of.x, phase="training", optimizer=torch.optim.SGD),
        "expected a name",
    ),
    "tensors by inputs": (
        lambda of: rt.report(of.model, inputs={"input": of.x}),
        "expected shapes by name",
    ),
    "dtype of torch": (
        lambda of: rt.estimate(of.graph, dtype=torch.bfloat16),
        "expected the name of a precision",
    ),
    "size as text": (lambda of: rt.report(of.target, batch="8"), "--batch '8': expected a whole"),
    "size that is a truth": (lambda of: rt.report(of.target, batch=True), "expected a whole"),
    "graph to compare": (lambda of: rt.compare(of.graph), "have to run the module itself"),
    "a size beside all sizes": (
        lambda of: rt.tools.trace_target(of.target, request=rt.types.Request(batch=2), kv=3),
        "request and kv say the same",
    ),
    "neither module nor step": (
        lambda of: rt.report(3, of.x),
        "expected a torch.nn.Module to trace, got int: 3",
    ),
    "class of modules": (
        lambda of: rt.trace(nn.Linear, of.x),
        "expected a torch.nn.Module to trace, got type",
    ),
    "optimizer of other phases": (
        lambda of: rt.report(of.target, phases=["forward"], optimizer="sgd"),
        "it is for training, and this is forward",
    ),
    "module among graphs": (
        lambda of: rt.report({"forward": of.model}),
        "'forward': expected an OpGraph, got Linear; trace it first",
    ),
    "one of several phases": (
        lambda of: rt.estimate({"forward": of.graph, "training": of.graph}),
        "which phase",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_nothing_would_use_is_refused(call: Ask, message: str, of: SimpleNamespace) -> None:
    with pytest.raises(rt.types.RequestError, match=message):
        call(of)


def test_the_largest_batch_of_every_phase_takes_what_is_for_one_of_them(config: Path) -> None:
    fits = rt.largest_batch(config, chip="l4", phases=["prefill", "decode"], seq=16, kv=8)
    assert list(fits) == ["prefill", "decode"]


def test_a_size_may_be_a_number_of_numpy(config: Path) -> None:
    graph = rt.trace(config, batch=numpy.int64(3), seq=numpy.int32(5), phase="prefill")
    assert (graph.workload["batch"], graph.workload["seq"]) == (3, 5)


def test_one_chip_and_one_execution_where_one_is_asked(of: SimpleNamespace) -> None:
    with pytest.raises(LookupError, match="expected one name, path or Chip"):
        rt.diff(of.graph, of.graph, chip=3)
    with pytest.raises(ValueError, match="or an ExecutionModel"):
        rt.estimate(of.graph, execution=3)
    with pytest.raises(rt.types.RequestError, match="chip l4, a10: expected one"):
        rt.diff(of.graph, of.graph, chip=["l4", "a10"])
    with pytest.raises(rt.types.RequestError, match="execution eager, naive: expected one"):
        rt.estimate(of.graph, execution=["eager", "naive"])
    with pytest.raises(LookupError, match="expected one name, path or Chip"):
        rt.report(of.graph, chip=3)


def test_an_error_of_a_diff_names_the_side(of: SimpleNamespace) -> None:
    with pytest.raises(rt.types.RequestError, match="after: "):
        rt.diff(nn.Linear(8, 8), nn.Bilinear(8, 8, 8), torch.zeros(2, 8))
    with pytest.raises(rt.types.TraceError, match="after: "):
        rt.diff(nn.Linear(8, 8), nn.Linear(9, 8), torch.zeros(2, 8))
