"""Graphs on disk: whole, reproducible, and refused where they are not what they say."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.graph.file import SCHEMA, GraphFileError, load_graphs, looks_saved
from rooftrace.graph.records import Assumption
from rooftrace.tracer.api import trace_target


@pytest.fixture
def graph(model: Callable[..., Any]) -> rt.types.OpGraph:
    case = model("control_flow")
    return rt.trace(case.module, phase="training", **case.kwargs)


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_a_saved_graph_comes_back_equal(name: str, graph: rt.types.OpGraph, tmp_path: Path) -> None:
    rt.save(graph, tmp_path / name)
    assert rt.load(tmp_path / name) == graph
    assert looks_saved(tmp_path / name)
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@pytest.mark.parametrize("name", ["deepseek", "t5", "lstm"])
def test_every_argument_of_an_op_comes_back(
    name: str, model: Callable[..., Any], tmp_path: Path
) -> None:
    case = model(name)
    made = rt.trace(case.module, *case.args, **case.kwargs)
    rt.save(made, tmp_path / "graph.json.gz")
    assert rt.load(tmp_path / "graph.json.gz").ops == made.ops


@pytest.mark.parametrize(
    "constant, data",
    [
        (lambda: torch.tensor([0.5] * 8), "0000003f" * 8),
        (lambda: torch.tensor(0.5).expand(1), "0000003f"),  # one element, of stride 0
    ],
)
def test_constants_of_the_code_come_back(
    constant: Callable[[], torch.Tensor],
    data: str,
    module: Callable[..., nn.Module],
    tmp_path: Path,
) -> None:
    graph = rt.trace(module(lambda self, x: self.lin(x) + constant()), torch.ones(1, 8))
    rt.save(graph, tmp_path / "graph.json")
    assert list(rt.load(tmp_path / "graph.json").constants.values()) == [data]


@pytest.mark.parametrize("name", ["one.json", "one.json.gz"])
def test_two_traces_of_one_target_give_the_same_bytes(
    name: str, tmp_path: Path, root: Path
) -> None:
    contents = []
    for folder in ("first", "second"):
        graphs = trace_target(f"{root}/examples/models/lstm_tagger.py:build")
        rt.save(graphs, tmp_path / folder / name)
        contents.append((tmp_path / folder / name).read_bytes())
    assert contents[0] == contents[1]


def test_a_file_with_several_phases_asks_which(model: Callable[..., Any], tmp_path: Path) -> None:
    case = model("perceptron")
    graphs = {
        phase: rt.trace(case.module, *case.args, phase=phase) for phase in ("forward", "training")
    }
    path = tmp_path / "both.json"
    rt.save(graphs, path)
    assert rt.load(path, "training") == graphs["training"]
    assert trace_target(path, ["forward"]) == {"forward": graphs["forward"]}
    with pytest.raises(GraphFileError, match="which phase is wanted; it holds forward, training"):
        rt.load(path)
    with pytest.raises(GraphFileError, match="there is no phase 'decode'"):
        rt.load(path, "decode")
    with pytest.raises(GraphFileError, match="no graph of phase 'decode'; it holds forward"):
        trace_target(path, ["decode"])


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _without_ops(content: bytes) -> bytes:
    data = json.loads(gzip.decompress(content))
    del data["graphs"]["training"]["ops"]
    return json.dumps(data).encode()


def _of_a_later_version(content: bytes) -> bytes:
    return gzip.decompress(content).replace(SCHEMA.encode(), b"rooftrace.graph/99")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "not a readable saved graph"),
        (lambda content: _cut(gzip.decompress(content)), "not a readable saved graph"),
        (lambda content: b"\x93NUMPY", "not a readable saved graph"),
        (lambda content: b"[1, 2]", "schema is None, expected 'rooftrace.graph/3'"),
        (_of_a_later_version, "schema is 'rooftrace.graph/99'"),
        (_without_ops, "graphs.training: ops is missing"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    damage: Callable[[bytes], bytes], message: str, graph: rt.types.OpGraph, tmp_path: Path
) -> None:
    path = tmp_path / "graph.json.gz"
    rt.save(graph, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(GraphFileError, match=message) as caught:
        load_graphs(path)
    assert str(path) in str(caught.value)


def test_a_graph_that_breaks_its_own_rules_is_refused(
    graph: rt.types.OpGraph, tmp_path: Path
) -> None:
    path = tmp_path / "graph.json"
    rt.save(graph.replace(outputs=(len(graph.values),)), path)
    with pytest.raises(ValueError, match=r"graph input or output \d+ is not there"):
        load_graphs(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x1f\x8b", b"\x1f\x8bnot gzip"])
def test_other_files_do_not_look_saved(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert not looks_saved(tmp_path / "file")
    assert not looks_saved(tmp_path / "nowhere")


def test_an_interrupted_write_leaves_the_old_file(
    graph: rt.types.OpGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def interrupted(*names: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rt.save(graph, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_no_text_file_can_hold_comes_back(tmp_path: Path) -> None:
    stack = torch.nn.Sequential()
    stack.add_module("lone\udcffsurrogate", torch.nn.Linear(4, 4))
    graph = rt.trace(stack, torch.empty(2, 4))
    rt.save(graph, tmp_path / "graph.json")
    assert rt.load(tmp_path / "graph.json").ops == graph.ops
    (tmp_path / "graph.json").read_text(encoding="utf-8")


class Endless(nn.Module):
    """Ops with infinities and NaNs among their arguments, alone and in lists."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(min=-math.inf, max=math.inf)
        hidden = torch.full(x.shape, -math.inf, device=x.device).triu(1)
        x = torch.where(x > math.inf, math.nan, x) + hidden
        return x.masked_fill(x.isnan(), math.nan).nan_to_num(math.nan, math.inf, -math.inf)


def test_infinities_and_nans_come_back_from_strict_json(tmp_path: Path) -> None:
    def bare(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    made = rt.trace(Endless(), torch.zeros(4, 4))
    rt.save(made, tmp_path / "graph.json")
    text = (tmp_path / "graph.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=bare)
    read = rt.load(tmp_path / "graph.json")
    assert read == made == rt.trace(Endless(), torch.zeros(4, 4))
    numbers = [a for op in read.ops for a in op.arguments.values() if isinstance(a, float)]
    assert {repr(number) for number in numbers} == {"inf", "-inf", "nan"}
    rt.save(read, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == text


def test_a_file_of_an_earlier_release_has_them_bare(tmp_path: Path) -> None:
    made = rt.trace(Endless(), torch.zeros(4, 4))
    rt.save(made, tmp_path / "graph.json")
    text = (tmp_path / "graph.json").read_text(encoding="utf-8")
    for name, bare in (("inf", "Infinity"), ("-inf", "-Infinity"), ("nan", "NaN")):
        text = text.replace(f'{{"number":"{name}"}}', bare)
    assert '"number"' not in text
    (tmp_path / "old.json").write_text(text, encoding="utf-8")
    assert rt.load(tmp_path / "old.json") == made


def test_facts_of_the_model_and_of_assumptions_may_be_infinite(tmp_path: Path) -> None:
    linear = rt.trace(nn.Linear(4, 4), torch.empty(2, 4))
    limits = {"time_step_limit": [0.0, math.inf], "eps": math.nan}
    made = linear.replace(
        model={**linear.model, "config": limits},
        assumptions=(Assumption(id=0, kind="value", where="", text="no end", value=-math.inf),),
    )
    rt.save(made, tmp_path / "graph.json")
    assert rt.load(tmp_path / "graph.json") == made


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    rt.save(rt.trace(Endless(), torch.zeros(4, 4)), tmp_path / "graph.json")
    text = (tmp_path / "graph.json").read_text(encoding="utf-8")
    (tmp_path / "graph.json").write_text(text.replace('"number":"nan"', '"number":"1e9"'))
    with pytest.raises(GraphFileError, match="an argument"):
        rt.load(tmp_path / "graph.json")
