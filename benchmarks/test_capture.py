"""What tracing costs beside what it traces: compare the rows of one run, never across runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rooftrace as rt
from rooftrace.tracer.inputs.calls import Inputs
from rooftrace.tracer.phases import collector_paused
from rooftrace.tracer.phases.running import trace_phases
from rooftrace.tracer.request import Request
from rooftrace.tracer.targets.target import load_target

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
MODELS = ("gpt2", "llama-3.1-8b", "deepseek-v3")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """A language model on meta, with 8 x 255 tokens."""
    return load_target(str(CONFIGS / f"{request.param}.json"), Request(batch=8, seq=255))


@pytest.mark.benchmark(group="forward", max_time=5)
def test_plain_meta_forward(benchmark: Any, model: Any) -> None:
    """The floor: the module on meta tensors, values supplied where its code needs them."""
    positions = torch.arange(255)[None]
    mask = torch.ones(1, 1, 255, 255, dtype=torch.bool).tril().to("meta")

    def forward() -> None:
        with torch.no_grad():
            model.module(
                input_ids=model.inputs.kwargs["input_ids"],
                attention_mask=mask,
                position_ids=positions.to("meta"),
                use_cache=False,
            )

    benchmark(forward)


@pytest.mark.benchmark(group="forward", max_time=5)
@pytest.mark.parametrize("phase", ["forward", "prefill", "decode", "training"])
def test_trace(benchmark: Any, model: Any, phase: str) -> None:
    """Capture and lowering of one phase, as `trace` does it; "forward" is without a cache."""
    inputs = model.inputs
    if phase == "forward":
        ids = {"input_ids": inputs.kwargs["input_ids"], "use_cache": False}
        inputs = Inputs(kwargs=ids)

    def trace() -> None:
        with collector_paused():
            trace_phases(model.module, inputs, (phase,))

    benchmark(trace)


@pytest.mark.benchmark(group="large", min_rounds=1, max_time=1)
@pytest.mark.parametrize("case", ["deepseek-v3, eager experts", "mamba, 64 layers, 4096 tokens"])
def test_trace_what_runs_python_often(benchmark: Any, case: str) -> None:
    """Expert loops and scans: their Python runs for one layer, and for a few turns."""
    if case.startswith("mamba"):
        transformers = pytest.importorskip("transformers")
        with torch.device("meta"):
            module = transformers.MambaForCausalLM(transformers.MambaConfig(num_hidden_layers=64))
        ids = torch.ones(1, 4096, dtype=torch.long, device="meta")
    else:
        target = load_target(str(CONFIGS / "deepseek-v3.json"), Request(batch=8, seq=255))
        module, ids = target.module, target.inputs.kwargs["input_ids"]
        module.set_experts_implementation("eager")

    def trace() -> None:
        with collector_paused():
            trace_phases(
                module, Inputs(kwargs={"input_ids": ids, "use_cache": False}), ("forward",)
            )

    benchmark.pedantic(trace, rounds=2)


@pytest.mark.benchmark(group="price", max_time=5)
@pytest.mark.parametrize("execution", ["naive", "efficient"])
def test_price(benchmark: Any, model: Any, execution: str) -> None:
    """Pricing of a prefill graph."""
    graph = trace_phases(model.module, model.inputs, ("prefill",))["prefill"]
    benchmark(rt.estimate, graph, "h200-sxm", execution)


@pytest.mark.benchmark(group="process", min_rounds=3, max_time=5)
@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "pass"],
        ["-c", "import rooftrace"],
        ["-m", "rooftrace", "--help"],
        ["-c", "import torch"],
    ],
    ids=" ".join,
)
def test_start(benchmark: Any, arguments: list[str]) -> None:
    """A process from start to exit, beside an empty one and one that imports torch."""
    benchmark(subprocess.run, [sys.executable, *arguments], capture_output=True, check=True)
