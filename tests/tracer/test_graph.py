"""What `OpGraph.verify` refuses, and the sizes of a value."""

from typing import Any

import pytest
from msgspec.structs import replace

from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import GraphError, Op, Ref, Repeat, Tensor, pattern_of, refs

pytestmark = pytest.mark.quick


def value(storage: int, **changes: Any) -> Tensor:
    return replace(Tensor((2, 3), "fp32", (3, 1), "activations", storage), **changes)


def op(index: int, inputs: tuple[int, ...], outputs: tuple[int, ...], **changes: Any) -> Op:
    arguments = {f"argument_{i}": Ref(i) for i in inputs}
    return replace(Op(index, "aten.relu.default", arguments, inputs, outputs), **changes)


GOOD = OpGraph(
    "forward",
    tuple(value(i) for i in range(3)),
    (op(0, (0,), (1,)), op(1, (1,), (2,))),
    inputs=(0,),
    outputs=(2,),
)


def test_a_good_graph_is_returned_as_it_is() -> None:
    assert GOOD.verify() is GOOD
    assert GOOD.external == (0,)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"values": (value(0, role="cache"), value(1), value(2))}, "value 0 has role 'cache'"),
        ({"values": (value(7), value(1), value(2))}, "value 0 says storage 7; there are 3 values"),
        ({"values": (value(1), value(2), value(2))}, "value 0 says storage 1, which is itself a"),
        ({"values": (value(0, stride=(1,)), value(1), value(2))}, "does not fit shape"),
        ({"ops": (op(5, (0,), (1,)), op(1, (1,), (2,)))}, "op at position 0 has id 5"),
        ({"ops": (op(0, (0,), (1,), part="loss"), op(1, (1,), (2,)))}, "has part 'loss'"),
        ({"ops": (op(0, (0,), (1,), kind="free"), op(1, (1,), (2,)))}, "kind 'free'"),
        ({"ops": (op(0, (9,), (1,)), op(1, (1,), (2,)))}, "reads value 9, which is not there"),
        ({"ops": (op(0, (1,), (2,)), op(1, (0,), (1,)))}, "reads value 1 before it is made"),
        ({"ops": (op(0, (0,), (1,), arguments={}), op(1, (1,), (2,)))}, "differ from its arg"),
        ({"ops": (op(0, (0,), (1,)), op(1, (0,), (1,)))}, "makes value 1 twice"),
        ({"inputs": (3,)}, "graph input or output 3 is not there"),
        ({"outputs": (-1,)}, "graph input or output -1 is not there"),
    ],
)
def test_a_broken_graph_is_refused(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        GOOD.replace(**broken).verify()


def test_an_expanded_tensor_holds_each_element_once() -> None:
    expanded = value(0, shape=(4, 3), stride=(0, 1))
    assert expanded.elements == 12
    assert expanded.unique_elements == 3
    assert expanded.nbytes == 3 * 4


def test_values_are_found_in_nested_arguments_in_order() -> None:
    assert list(refs({"tensors": (Ref(4), (Ref(2),)), "dim": 3, "other": Ref(1)})) == [4, 2, 1]


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("layers.3.mlp", "layers.*.mlp"),
        ("0", "*"),
        ("h.11.attn.2", "h.*.attn.*"),
        ("conv2d.fc1", "conv2d.fc1"),
        ("", ""),
    ],
)
def test_the_indices_of_a_module_path_become_stars(path: str, pattern: str) -> None:
    assert pattern_of(path) == pattern


def test_a_printed_graph_lists_its_kernels_and_how_often_each_runs() -> None:
    repeated = GOOD.ops[1]
    graph = GOOD.replace(
        ops=(replace(GOOD.ops[0], kind="view"), replace(repeated, module="layers.1", repeats=(0,))),
        repeats=(Repeat(0, 7, "layers", 1),),
    )
    head, *lines = str(graph).splitlines()
    assert head.startswith("forward: 8 ops, 7 without views")
    assert [line.split() for line in lines] == [
        ["1", "7", "x", "aten.relu.default", "layers.1", "fp32[2,", "3]"]
    ]
    assert repr(graph) == "OpGraph(model, forward: 8 ops, 2 of them stand here; 3 values)"


def test_a_printed_graph_says_how_many_kernels_it_leaves_out() -> None:
    count = 50
    ops = tuple(op(i, (i,), (i + 1,)) for i in range(count))
    graph = GOOD.replace(values=tuple(value(i) for i in range(count + 1)), ops=ops)
    *shown, last = str(graph).splitlines()[1:]
    assert last == f"... and {count - len(shown)} more, in graph.ops"
    assert 0 < len(shown) < count
