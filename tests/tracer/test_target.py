"""Python targets: what is found, built and resized, and what each mistake is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.api import trace_target
from rooftrace.tracer.request import Request
from rooftrace.tracer.targets.target import load_target
from rooftrace.tracer.values.masks import REAL_VALUE

pytestmark = pytest.mark.quick

HEAD = "import torch\nfrom torch import nn\n"
LINEAR = "nn.Linear(8, 8)"


@pytest.fixture
def target(tmp_path: Path) -> Callable[[str, str], str]:
    """`target(code, name)`: the target `name` in a file with this code after the imports."""

    def written(code: str, name: str = "build") -> str:
        (tmp_path / "user.py").write_text(HEAD + code)
        return f"{tmp_path}/user.py:{name}"

    return written


def function(body: str) -> str:
    return f"def build():\n    {body}\n"


# -- what is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "names"),
    [
        (function(f"return {LINEAR}, torch.ones(2, 8)"), ["input"]),
        (function(f"return {LINEAR}, (torch.ones(2, 8),)"), ["input"]),
        (function(f"return {LINEAR}, {{'input': torch.ones(2, 8)}}"), ["input"]),
        (function(f"return {LINEAR}.cuda(), torch.ones(2, 8, device='cuda')"), ["input"]),
        (
            "class build(nn.Linear):\n    def __init__(self):\n        super().__init__(8, 8)\n",
            ["input"],
        ),
        (f"build = {LINEAR}\n", ["input"]),
    ],
)
def test_a_module_and_its_inputs_come_from_a_file(
    code: str, names: list[str], target: Callable[..., str]
) -> None:
    request = Request(inputs={"input": "2,8:fp32"} if "ones" not in code else {})
    graph = trace_target(target(code), ["forward"], request)["forward"]
    assert [graph.values[i].name for i in graph.inputs] == names
    assert [graph.values[i].shape for i in graph.inputs] == [(2, 8)]
    assert sum(op.name == "aten.addmm" for op in graph.ops) == 1


def test_an_attribute_of_an_installed_module_is_a_target() -> None:
    loaded = load_target("torch.nn:Identity", Request(inputs={"input": "4,3:bf16"}))
    assert loaded.name == "torch.nn:Identity"
    assert loaded.inputs.workload == {"batch": 4, "inputs": {"input": "bf16[4, 3]"}}


def test_a_file_may_import_its_neighbours(target: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_user.py").write_text("WIDTH = 8\n")
    code = "from neighbour_of_user import WIDTH\n" + function(
        "return nn.Linear(WIDTH, 2), torch.ones(1, WIDTH)"
    )
    assert load_target(target(code)).module.in_features == 8


def test_drawn_token_ids_are_known(target: Callable[..., str]) -> None:
    code = function("return nn.Embedding(10, 4), torch.randint(0, 10, (2, 500))")
    graph = trace_target(target(code), ["forward"])["forward"]
    assert graph.ops[0].facts == {"rows_touched": 10}


def test_phases_follow_from_the_module(target: Callable[..., str]) -> None:
    code = function(f"return {LINEAR}, torch.ones(2, 8)")
    assert list(trace_target(target(code))) == ["forward", "training"]


def test_a_hugging_face_model_brings_its_inputs(target: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    code = "from transformers import LlamaConfig, LlamaForCausalLM\n" + function(
        "return LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, vocab_size=32, "
        "num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))"
    )
    graphs = trace_target(target(code), request=Request(batch=3, seq=5, kv=7))
    assert list(graphs) == ["prefill", "decode", "training"]
    prefill, decode = graphs["prefill"], graphs["decode"]
    assert prefill.values[prefill.inputs[0]].shape == (3, 5)
    assert {
        decode.values[i].shape[2] for i in decode.external if decode.values[i].role == "kv"
    } == {7}


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs", ["(torch.ones(2, 8),)", "{'input': torch.ones(2, 8)}", "torch.ones(2, 8)"]
)
def test_the_batch_of_given_inputs_can_be_changed(inputs: str, target: Callable[..., str]) -> None:
    loaded = load_target(target(function(f"return {LINEAR}, {inputs}")), Request(batch=5))
    graph = trace_target(
        target(function(f"return {LINEAR}, {inputs}")), ["forward"], Request(batch=5)
    )["forward"]
    assert loaded.inputs.workload["batch"] == 5
    assert graph.values[graph.outputs[0]].shape == (5, 8)
    assert graph.workload["items"] == 5


def test_known_values_are_repeated_for_a_larger_batch(target: Callable[..., str]) -> None:
    code = function("return nn.Embedding(10, 4), (torch.tensor([[1, 2], [3, 4]]), )")
    loaded = load_target(target(code), Request(batch=3))
    assert vars(loaded.inputs.args[0])[REAL_VALUE].tolist() == [[1, 2], [3, 4], [1, 2]]


def test_only_tensors_of_the_batch_are_resized(target: Callable[..., str]) -> None:
    code = (
        "class Scaled(nn.Module):\n    def forward(self, x, weights, factor):\n"
        "        return x * weights * factor\n"
        + function(
            "return Scaled(), {'x': torch.ones(2, 8), 'weights': torch.ones(8), 'factor': 3}"
        )
    )
    loaded = load_target(target(code), Request(batch=7))
    assert loaded.inputs.workload["inputs"] == {
        "x": "fp32[7, 8]",
        "weights": "fp32[8]",
        "factor": "3",
    }


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "target 'resnet': expected package.module:attr, path/file.py:attr, a Hugging"),
        ("nowhere.py:build", "target 'nowhere.py:build': there is no file 'nowhere.py'"),
        ("no_such_package.part:build", "there is no module 'no_such_package'"),
        ("torch.nn.no_such_part:build", "there is no module 'torch.nn.no_such_part'"),
        ("torch.nn:NoSuchLayer", "target 'torch.nn:NoSuchLayer': there is no 'NoSuchLayer'"),
        (
            "torch.nn:Linear",
            "expected a function without required arguments; it requires in_features, out_features",
        ),
        ("math:pi", "expected a torch.nn.Module or a function that returns one, got float"),
        ("builtins:dict", r"expected a torch.nn.Module, \(module, inputs\) or .*, got dict"),
    ],
)
def test_a_target_that_is_none_is_told_why(name: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        load_target(name)


@pytest.mark.parametrize(
    ("code", "doing", "error", "line"),
    [
        ("x = 1 / 0\n", "importing", "ZeroDivisionError: division by zero", 3),
        ("import no_such_package_at_all\n", "importing", "ModuleNotFoundError: No module named", 3),
        ("def build(:\n", "importing", "SyntaxError: invalid syntax", 3),
        ("raise SystemExit(2)\n", "importing", "SystemExit: 2", 3),
        (function("return nn.Linear(8, 'eight')"), "building the module", "TypeError: ", 4),
        (function("raise ValueError"), "building the module", "ValueError: no message", 4),
    ],
)
def test_code_of_the_user_that_raises_is_quoted(
    code: str, doing: str, error: str, line: int, target: Callable[..., str]
) -> None:
    name = target(code)
    with pytest.raises(TargetError) as caught:
        load_target(name)
    first, *frames = str(caught.value).splitlines()
    assert first.startswith(f"target {name!r}: {doing}")
    assert error in str(caught.value)
    assert f"user.py:{line} in" in frames[-1]
    assert len(frames) <= 4


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, r"no inputs; let build return \(module, inputs\), or pass --input NAME=SHAPE:DTYPE"),
        ({"inputs": {"input": "2,many"}}, "--input input=2,many: expected SHAPE:DTYPE, for exam"),
        ({"inputs": {"input": "2,-8"}}, "--input input=2,-8: expected SHAPE:DTYPE"),
        (
            {"inputs": {"input": "2,8:fp33"}},
            "--input input=2,8:fp33: 'fp33' has no torch dtype; these have: bf16, bool",
        ),
        ({"inputs": {"x": "2,8"}}, "--input x: Linear.forward takes input"),
        ({"inputs": {"input": "2,8"}, "seq": 4}, "--seq 4: .* makes its own inputs"),
        ({"inputs": {"input": "2,8"}, "kv": 4}, "--kv 4: .* makes its own inputs"),
        ({"inputs": {"input": ":fp32"}, "batch": 4}, "--batch 4: no input is a tensor with a"),
    ],
)
def test_inputs_that_make_no_sense_are_refused(
    request_: dict[str, Any], message: str, target: Callable[..., str]
) -> None:
    name = target(function(f"return {LINEAR}"))
    with pytest.raises(RequestError, match=message):
        load_target(name, Request(**request_))


@pytest.mark.parametrize("flag", ["batch", "seq", "kv"])
def test_a_size_below_one_is_refused(flag: str) -> None:
    with pytest.raises(RequestError, match=f"--{flag} 0: expected a whole number of at least 1"):
        Request(**{flag: 0})


def test_a_decorator_for_a_gpu_counts_without_one(tmp_path: Path) -> None:
    path = tmp_path / "cast.py"
    path.write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    @torch.autocast('cuda', dtype=torch.bfloat16)\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)\n"
        "def build():\n"
        "    return Net(8, 8), (torch.ones(2, 8),)\n"
    )
    graph = trace_target(f"{path}:build", ["forward"])["forward"]
    assert graph.values[graph.outputs[0]].dtype == "bf16"


def test_a_file_that_runs_nothing_is_told_with_what_it_defines(tmp_path: Path) -> None:
    path = tmp_path / "nets.py"
    path.write_text(
        HEAD + "class Net(nn.Linear):\n    pass\n\n\ndef build():\n    return Net(8, 8)\n"
    )
    with pytest.raises(TargetError, match=r"nets.py:NAME; it defines Net, build$"):
        rt.estimate(str(path), chip="l4")


def test_a_function_may_return_arguments_and_named_ones(tmp_path: Path) -> None:
    path = tmp_path / "both.py"
    path.write_text(
        HEAD
        + """class Net(nn.Linear):
    def forward(self, x, *, again, scale=1.0):
        return super().forward(x + again) * scale


def build():
    return Net(8, 16), (torch.zeros(2, 8),), {"again": torch.zeros(2, 8), "scale": 0.5}


def wrong():
    return Net(8, 16), torch.zeros(2, 8), torch.zeros(2, 8)
"""
    )
    graph = trace_target(f"{path}:build", ["forward"])["forward"]
    assert graph.values[graph.outputs[0]].shape == (2, 16) and len(graph.inputs) == 2
    with pytest.raises(TargetError, match=r"got \(Net, Tensor, Tensor\)"):
        trace_target(f"{path}:wrong", ["forward"])
