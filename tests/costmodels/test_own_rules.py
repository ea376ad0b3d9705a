"""Rules of users: names that an op does not have, errors inside a rule, rules of no op."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.ops.opview import RuleError, own_rules

pytestmark = pytest.mark.quick

LIBRARY = torch.library.Library("ruled", "DEF")
LIBRARY.define("lora(Tensor x, Tensor a, Tensor b, Tensor? bias=None, float scale=1.0) -> Tensor")
LIBRARY.impl("lora", lambda x, a, b, bias=None, scale=1.0: x.new_empty(4, b.shape[1]), "Meta")
LIBRARY.define("scale_(Tensor(a!) x) -> ()")
LIBRARY.impl("scale_", lambda x: None, "Meta")
READ = 4 * (4 * 16 + 16 * 2 + 2 * 16)  # x[4, 16], a[16, 2] and b[2, 16] in fp32
WRITTEN = 4 * 4 * 16


class Lora(torch.nn.Module):
    def forward(self, x, a, b):
        return torch.ops.ruled.lora(x, a, b)


class Scale(torch.nn.Module):
    def forward(self, x):
        torch.ops.ruled.scale_(x)
        return x


@pytest.fixture(autouse=True)
def rules_made_here_go_away() -> Iterator[None]:
    with own_rules():
        yield


@pytest.fixture(scope="module")
def graph() -> rt.types.OpGraph:
    return rt.trace(Lora(), torch.empty(4, 16), torch.empty(16, 2), torch.empty(2, 16))


def planned(
    graph: rt.types.OpGraph, rule: Callable[[rt.extend.OpView], rt.extend.Cost]
) -> rt.types.Plan:
    rt.extend.rule("ruled::lora")(rule)
    return rt.plan(graph)


WITH_NAMES_THAT_ARE_NOT_THERE = {
    "reading": lambda op: op.reading("x", "bais"),
    "streamed": lambda op: op.streamed(unread=("bais",)),
    "attribute": lambda op: rt.extend.Cost.of(vector=op.attribute("bais", 0)),
    "tensor": lambda op: rt.extend.Cost.of(vector=op.tensor("bais").elements),
    "tensors": lambda op: op.read_all(op.tensors("bais")),
    "operands": lambda op: op.read_all(t for _, t in op.operands(only=("bais",))),
    "first": lambda op: op.read(op.first("bais", "biased")),
}


@pytest.mark.parametrize("method", WITH_NAMES_THAT_ARE_NOT_THERE)
def test_a_name_that_is_not_in_the_schema_is_an_error(method, graph):
    with pytest.raises(RuleError) as error:
        planned(graph, WITH_NAMES_THAT_ARE_NOT_THERE[method])
    text = str(error.value)
    assert 'has no argument "bais"; its schema has x, a, b, bias, scale' in text
    assert "did you mean 'bias'?" in text


def test_a_name_of_an_argument_that_the_call_leaves_out_is_no_error(graph):
    def lora(op: rt.extend.OpView) -> rt.extend.Cost:
        assert op.schema == ("x", "a", "b", "bias", "scale")
        assert op.tensor("bias") is None and op.first("bias", "x") == op.inputs[0]
        assert op.attribute("scale", 1.0) == 1.0
        return op.read(op.tensor("bias")) + op.streamed(unread=("bias",))

    assert planned(graph, lora).bytes.total == READ + WRITTEN


def test_a_saved_graph_knows_the_names_too(graph, tmp_path):
    rt.save(graph, tmp_path / "graph.json")
    saved = rt.load(tmp_path / "graph.json")
    assert saved.schemas == graph.schemas
    assert saved.schemas["ruled.lora.default"] == ("x", "a", "b", "bias", "scale")
    with pytest.raises(RuleError, match='no argument "bais"'):
        planned(saved, lambda op: op.reading("bais"))


def test_names_are_not_checked_where_the_schema_is_not_known(graph):
    by_hand = graph.replace(schemas={})
    assert planned(by_hand, lambda op: op.reading("bais")).bytes.total == WRITTEN


@pytest.mark.parametrize(
    "rule, said",
    [
        (lambda op: None, "it returned None; expected a rooftrace.extend.Cost"),
        (lambda op: {}["rank"], "KeyError: 'rank'"),
        (
            lambda op: rt.extend.Cost.of(matmul=2, precision="banana"),
            'precision "banana": expected one of',
        ),
        (
            lambda op: rt.extend.Cost.of(vector=1, precision="banana"),
            'precision "banana": expected one of',
        ),
        (
            lambda op: rt.extend.Cost.of(vector=op.tensor("bias").elements),
            "AttributeError: 'NoneType'",
        ),
        (lambda op: op.read(op.needed("bias")), "expected a tensor argument bias, got x, a, b"),
    ],
)
def test_an_error_inside_a_rule_names_the_rule_where_it_is_and_the_op(rule, said, graph):
    with pytest.raises(RuleError) as error:
        planned(graph, rule)
    where = f"tests.costmodels.test_own_rules.<lambda>:{rule.__code__.co_firstlineno}"
    op = "ruled.lora.default(x=fp32[4, 16], a=fp32[16, 2], b=fp32[2, 16])"
    text = str(error.value)
    assert text.startswith(f'rule "ruled.lora" ({where}) for {op}: ') and said in text


def test_a_rule_of_a_file_is_named_by_the_file(graph, tmp_path: Path):
    from rooftrace.reporting.cli.options import load_rules

    path = tmp_path / "mine.py"
    path.write_text(
        "import rooftrace\n@rooftrace.extend.rule('ruled::lora')\ndef f(op): return 3\n"
    )
    load_rules([str(path)])
    with pytest.raises(RuleError, match=rf"\(f in {path}:2\) for .*: it returned 3"):
        rt.plan(graph)


def test_a_rule_of_a_prompt_or_of_a_callable_object_is_named_too(graph):
    names: dict[str, Callable[[rt.extend.OpView], rt.extend.Cost]] = {}
    exec("def f(op): return None", names)
    with pytest.raises(RuleError, match=r"\(f in <string>:1\)"):
        planned(graph, names["f"])

    class Fails:
        def __call__(self, op: rt.extend.OpView) -> rt.extend.Cost:
            raise LookupError

    rt.extend.rule("ruled::lora", override=True)(Fails())
    with pytest.raises(RuleError, match=r"\(.*test_own_rules\..*Fails\) for .*: LookupError"):
        rt.plan(graph)


def test_streamed_does_not_ask_for_a_self_that_the_op_does_not_have():
    rt.extend.rule("ruled::scale_")(lambda op: op.streamed())
    x = torch.empty(4, 16)
    graph = rt.trace(Scale(), x)
    assert rt.plan(graph).bytes.total == 2 * (4 * 4 * 16)  # reads x, writes x


# -- rules of no op --------------------------------------------------------------------------------


def test_a_rule_of_no_op_is_said_in_the_notes_and_on_the_screen(graph):
    rt.extend.rule("ruled::lorra")(lambda op: op.streamed())
    estimate = rt.estimate(graph, "h100-sxm")
    (note,) = estimate.notes
    assert note.startswith('the rule "ruled.lorra" (tests.costmodels.test_own_rules.')
    assert note.endswith(
        "prices nothing: ruled is loaded and has no op of this name; did you mean 'ruled.lora'?"
    )
    assert 'the rule "ruled.lorra"' in str(estimate)


@pytest.mark.parametrize(
    "name",
    [
        "ruled::lora",  # runs here
        "ruled.lora.default",
        "ruled::scale_",  # is there, and does not run here
        "ruled::scale_.default",
        "aten::add.out",
        "not_imported::lora",  # of a library that is not loaded
    ],
)
def test_a_rule_of_an_op_that_may_be_there_is_fine(name, graph):
    rt.extend.rule(name, override=True)(lambda op: op.streamed())
    assert rt.plan(graph).notes == ()


def test_without_torch_nothing_is_said_of_a_rule_of_no_op(graph, monkeypatch):
    import sys

    rt.extend.rule("ruled::lorra")(lambda op: op.streamed())
    monkeypatch.delitem(sys.modules, "torch")
    assert rt.plan(graph).notes == ()
