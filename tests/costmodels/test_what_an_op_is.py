"""What an op is belongs to its rule, with defaults from its cost; its name decides nothing."""

import dataclasses

import pytest

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.kernels.engines import op_class
from rooftrace.costmodels.kernels.knobs import load_knobs
from rooftrace.costmodels.ops.cost import AttentionSizes
from rooftrace.costmodels.ops.opview import RULES, find_rule
from rooftrace.graph.records import Ref
from tests.costmodels.graph_support import Builder

pytestmark = pytest.mark.quick

M, K, N = 512, 4096, 4096


@pytest.fixture(autouse=True)
def rules_made_here_go_away():
    find_rule("aten.mm.default")
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def product(op: rt.extend.OpView) -> rt.extend.Cost:
    """C[M, N] = A[M, K] B[K, N], as anybody would write it."""
    (m, k), n = op.inputs[0].shape, op.inputs[1].shape[1]
    flop = rt.extend.Cost.of(
        matmul=2 * m * k * n, precision=op.precision, rows=m, columns=n, inner=k
    )
    return flop + op.streamed()


def alone(target: str, *shapes: tuple[int, ...], out: tuple[int, ...]) -> rt.types.OpGraph:
    """A graph of one op."""
    b = Builder()
    inputs = [b.input(*shape) for shape in shapes]
    result = b.value(out)
    names = ("self", "mat2", "third")
    b.op(target, {n: Ref(i) for n, i in zip(names, inputs, strict=False)}, [result])
    return b.graph(result)


def kind(graph: rt.types.OpGraph) -> str:
    return op_class(graph.ops[0], graph)


@pytest.mark.parametrize("name", ["mylib.fast_gemm", "mylib.convert_to_fp8", "mylib.softmax_pool"])
def test_a_product_by_any_name_takes_as_long(name):
    rt.extend.rule(name)(product)
    execution = dataclasses.replace(execution_model("eager"), knobs=load_knobs("typical-eager"))
    seen = []
    for target in ("aten.mm", name):
        graph = alone(target, (M, K), (K, N), out=(M, N))
        estimate = rt.estimate(graph, "h100-sxm", execution)
        (row,) = estimate.rows
        assert row.name == target
        assert kind(graph) == "mm"
        seen.append((row.timing.t_device, row.family, row.pattern, estimate.t_est))
    assert seen[0] == seen[1]


def test_an_op_without_a_rule_is_no_convolution():
    graph = alone("mylib.convert_layout", (8, 8), out=(8, 8))
    assert kind(graph) == "elementwise"
    graph = alone("aten._convert_indices_from_csr_to_coo", (8, 8), out=(8, 8))
    assert kind(graph) == "elementwise"


def flash(op: rt.extend.OpView) -> rt.extend.Cost:
    b, s, h, e = op.inputs[0].shape
    sizes = AttentionSizes(b, s, s, s * s, h, h, e, e, 2)
    return rt.extend.Cost.of(matmul=sizes.flop, precision="bf16", attention=sizes) + op.streamed()


@pytest.mark.parametrize("options", [{}, {"kind": "attention"}])
def test_attention_is_known_by_its_sizes_or_by_its_rule(options):
    rt.extend.rule("mylib::flash_forward", **options)(
        flash if not options else lambda op: op.streamed()
    )
    shape = (2, 128, 4, 64)
    graph = alone("mylib.flash_forward", shape, shape, shape, out=shape)
    assert kind(graph) == "attention"
    assert [row.family for row in rt.estimate(graph).rows] == ["attention"]


@pytest.mark.parametrize(
    ("cost", "fusion", "expected"),
    [
        (rt.extend.Cost.of(matmul=2 * 4 * 5 * 6, rows=4, columns=5, inner=6), "opaque", "mm"),
        (rt.extend.Cost.of(matmul=7 * 2 * 4 * 5 * 6, rows=4, columns=5, inner=6), "opaque", "bmm"),
        (rt.extend.Cost.of(matmul=100), "opaque", "mm"),
        (rt.extend.Cost.of(convolution=100), "opaque", "conv"),
        (rt.extend.Cost.of(vector=100), "opaque", "elementwise"),
        (rt.extend.Cost.of(vector=100), "pointwise", "elementwise"),
        (rt.extend.Cost.of(vector=100), "reduction", "reduction"),
        (rt.extend.Cost(), "gather", "gather"),
    ],
)
def test_the_kind_follows_from_the_cost(cost, fusion, expected):
    rt.extend.rule("mylib::op", fusion=fusion)(lambda op: cost)
    assert kind(alone("mylib.op", (4, 4), out=(4, 4))) == expected


def test_what_a_rule_says_stands_above_its_cost():
    rt.extend.rule("mylib::op", kind="rnn", family="norm", label="my norm")(product)
    graph = alone("mylib.op", (M, K), (K, N), out=(M, N))
    assert kind(graph) == "rnn"
    (row,) = rt.estimate(graph).rows
    assert (row.family, row.name) == ("norm", "my norm")


def test_a_users_label_names_the_kernel_that_its_op_is_fused_into():
    rt.extend.rule("mylib::gate", fusion="pointwise", label="gate")(lambda op: op.streamed())
    b = Builder()
    x = b.input(64, 64)
    y = b.value((64, 64))
    b.op("mylib.gate", {"self": Ref(x)}, [y])
    graph = b.graph(b.unary("relu", y))
    assert [row.name for row in rt.estimate(graph, execution="efficient").rows] == ["gate (fused)"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mmm"}, r'rule\(.mylib::op.\): kind "mmm": expected one of conv, attention, .*'
                          r"; did you mean 'mm'\?"),
        ({"family": "atention"}, r"family .atention.: .*did you mean 'attention'\?"),
        ({"fusion": "pointwize"}, r'fusion "pointwize": expected one of opaque, pointwise, .*'),
        ({"traits": ("random",)}, r'trait "random": expected one of rereads, places'),
    ],
)  # fmt: skip
def test_an_unknown_word_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rt.extend.rule("mylib::op", **options)
