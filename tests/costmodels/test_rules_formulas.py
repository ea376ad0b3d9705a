"""Elementwise formulas: each is evaluated against torch, so what is counted is what is computed."""

import ast
import math

import pytest
import torch
from hypothesis import given, strategies as st

from rooftrace.costmodels.rules import elementwise, reduction
from rooftrace.costmodels.rules.elementwise import (
    FORMULAS,
    GELU,
    GELU_BACKWARD,
    flop_per_element,
)
from tests.costmodels.rules_support import cost, meta, view

pytestmark = pytest.mark.quick

# How a schema's names are called in formulas.
OPERANDS = {
    "self": "x",
    "input": "x",
    "other": "y",
    "output": "y",
    "grad_output": "g",
    "target": "t",
    "grad": "g",
    "grad_out": "g",
    "weight": "w",
    "end": "y",
    "tensor1": "a",
    "tensor2": "b",
}
NUMBERS = {
    "negative_slope": -0.2,
    "alpha": 1.7,
    "scale": 1.3,
    "input_scale": 0.7,
    "beta": 0.6,
    "threshold": 0.3,
    "value": 0.2,
    "lambd": 0.4,
    "min_val": -0.5,
    "max_val": 0.8,
    "delta": 0.7,
    "reduction": 0,
}
CONSTANTS = {
    "deg2rad": {"C": math.pi / 180},
    "rad2deg": {"C": 180 / math.pi},
    "sinc": {"C": math.pi},
    "special_sinc": {"C": math.pi},
    "hardsigmoid_backward": {"SIXTH": 1 / 6},
    "softplus": {"THRESHOLD": 20.0},
    "softplus_backward": {"THRESHOLD": 20.0},
    "isinf": {"INF": math.inf},
    "isfinite": {"INF": math.inf},
    "isposinf": {"INF": math.inf},
    "isneginf": {"INF": -math.inf},
    "mse_loss_backward": {"NORM": 2.0},
    "selu": {"ALPHA": 1.6732632423543772, "SCALE": 1.0507009873554805},
    "binary_cross_entropy": {"FLOOR": -100.0},
    "binary_cross_entropy_backward": {"EPS": 1e-12},
}
# Not functions of one value and numbers alone, or a family of functions (their formula is their
# name).
SPECIAL = {
    "nan_to_num",
    "linalg_cross",
    "cross",
    "glu",
    "rrelu_with_noise",
    "rrelu_with_noise_backward",
    "prelu",
    "signbit",
    "floor_divide",
    "heaviside",
    "sgn",
}
FAKE_QUANTISED = {n for n in FORMULAS if "fake_quantize" in n}
LOSSES = [
    n
    for n in (*reduction.FORWARD, *reduction.BACKWARD)
    if n
    not in {
        "kl_div",
        "poisson_nll_loss",
        "hinge_embedding_loss",
        "multilabel_margin_loss_forward",
        "multilabel_margin_loss_backward",
        "l1_loss",
    }
]  # composites, or they look at more than one value
COMPOSITE = sorted(
    set(FORMULAS) - set(elementwise.UNARY) - set(elementwise.BINARY) - SPECIAL - FAKE_QUANTISED
)
VALUES = [
    (0.7, 0.3, 1.1, 0.9),
    (-0.6, 0.4, -0.8, 0.2),
    (0.1, 0.9, 0.5, 0.6),
    (-3.5, 0.2, 1.5, 0.1),
    (4.0, 0.6, -1.5, 0.8),
]


def sign(x):
    return (x > 0) - (x < 0)


FUNCTIONS = {n: getattr(math, n) for n in dir(math) if not n.startswith("_")} | {
    "max": max,
    "min": min,
    "abs": abs,
    "sign": sign,
    "exp2": lambda x: 2.0**x,
    "rsqrt": lambda x: x**-0.5,
    "round": round,
}


def evaluate(formula, names):
    try:
        result = eval(compile(formula, "formula", "eval"), dict(FUNCTIONS), dict(names))
    except ValueError:  # log of a negative number
        return None
    return tuple(map(float, result if isinstance(result, tuple) else (result,)))


def call(name, x, y, g, w):
    """torch's value, and the names its arguments have in formulas."""
    packet = getattr(torch.ops.aten, name)
    overload = next(
        (getattr(packet, o) for o in ("Tensor", "self", "default") if o in packet.overloads()), None
    )
    names = {"x": x, "y": y, "g": g, "t": w, "w": w}
    constants = CONSTANTS.get(name, {})
    args, kwargs = [], {}
    for schema in overload._schema.arguments:
        kind = str(schema.type)
        if kind == "Tensor":
            letter = OPERANDS.get(schema.name, "x")
            if name.startswith("log_sigmoid_b") and schema.name == "buffer":
                value = torch.exp(-torch.tensor(abs(x), dtype=torch.float64)).reshape(1)
            else:
                value = torch.tensor([names[letter]], dtype=torch.float64)
        elif kind.startswith("Optional[Tensor"):
            value = None
        elif schema.name == "is_result":
            value = False
        elif schema.name.upper() in constants:
            value = constants[schema.name.upper()]
        elif schema.name == "threshold" and name.startswith("softplus"):
            value = 20.0
        elif schema.name == "eps" or (schema.name == "alpha" and name.startswith("add")):
            continue
        else:
            value = NUMBERS.get(schema.name, schema.default_value)
        if schema.kwarg_only:
            kwargs[schema.name] = value
        else:
            args.append(value)
        if not isinstance(value, torch.Tensor) and value is not None:
            names[schema.name.upper()] = value
    names["NORM"] = 1.0
    names |= constants
    out = overload(*args, **kwargs)
    return [float(o) for o in (out if isinstance(out, tuple) else (out,)) if o.numel()], names


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", [*COMPOSITE, *LOSSES])
def test_a_formula_computes_what_the_op_computes(name, values):
    if name.startswith("binary_cross_entropy") and "logits" not in name:
        values = (0.1 + 0.8 * abs(math.sin(values[0])), *values[1:])
    formula = FORMULAS.get(name) or reduction.FORWARD.get(name) or reduction.BACKWARD[name]
    expected, names = call(name, *values)
    found = evaluate(formula, names)
    if found is None or any(map(math.isnan, expected)):
        assert not all(map(math.isfinite, expected))
        return
    if name == "log_sigmoid_forward":
        expected = expected[:1]
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("x", [-2.0, -0.3, 0.0, 0.8, 3.0])
def test_gelu_computes_what_torch_computes(approximate, x):
    t = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.gelu(t, approximate=approximate)
    y.backward()
    root = math.sqrt(0.5) if approximate == "none" else math.sqrt(2 / math.pi)
    inner = {"C": root, "D": 0.044715, "x": x, "g": 1.0}
    outer = inner if approximate == "tanh" else {**inner, "D": 1 / math.sqrt(2 * math.pi)}
    assert evaluate(GELU[approximate], inner)[0] == pytest.approx(y.item())
    assert evaluate(GELU_BACKWARD[approximate], outer)[0] == pytest.approx(t.grad.item())


@pytest.mark.parametrize(
    "formula,flop",
    [
        ("x + y", 1),
        ("x + 2 * 3", 1),
        ("C * D * x", 1),
        ("-x", 1),
        ("exp(-x)", 2),
        ("x if x > 0 else x * S", 2),
        ("max(x, 0)", 1),
        ("(z := x * x) * z", 2),
        ("1 / (1 + exp(-x))", 4),
        ("sqrt(C)", 0),
        ("x < y < 1", 2),
        ("(g * x, g * y)", 2),
        ("x if x > L or x < -L else 0", 2),
    ],
)
def test_operations_are_counted_and_constants_fold(formula, flop):
    assert flop_per_element(formula) == flop


@given(
    st.recursive(
        st.sampled_from(["x", "y", "2.5", "C"]),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        max_leaves=8,
    )
)
def test_a_count_is_what_a_counting_number_counts(formula):
    class Counted:
        done = 0

        def _op(self, _other):
            Counted.done += 1
            return self

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
            __rtruediv__
        ) = _op

    class Number:
        """A constant: arithmetic among constants is done once, not per element."""

        def _op(self, other):
            return NotImplemented if isinstance(other, Counted) else self

        __add__ = __sub__ = __mul__ = __truediv__ = _op

    class Fold(ast.NodeTransformer):
        def visit_Constant(self, node):
            return ast.copy_location(ast.Name("C", ast.Load()), node)

    tree = ast.fix_missing_locations(Fold().visit(ast.parse(formula, mode="eval")))
    Counted.done = 0
    eval(compile(tree, "", "eval"), {"x": Counted(), "y": Counted(), "C": Number()})
    assert flop_per_element(formula) == Counted.done


def test_what_is_not_arithmetic_is_refused():
    with pytest.raises(ValueError, match="not arithmetic"):
        flop_per_element("x[0]")


@pytest.mark.parametrize(
    "function,flop",
    [
        (lambda x: x + x, 1),
        (lambda x: torch.add(x, x, alpha=2), 2),
        (lambda x: x**2, 1),
        (lambda x: x**3, 2),
        (lambda x: x**0.5, 1),
        (lambda x: torch.sigmoid(x), 4),
        (lambda x: torch.nn.functional.silu(x), 5),
        (lambda x: x.clamp(0, 1), 2),
        (lambda x: x.clamp(min=0), 1),
        (lambda x: x.clone(), 0),
        (lambda x: x.to(torch.bfloat16), 0),
        (lambda x: torch.where(x > 0, x, x), 1),
        (lambda x: torch.addcmul(x, x, x), 2),
        (lambda x: torch.addcmul(x, x, x, value=2), 3),
        (lambda x: x.masked_fill(meta(8, 8, dtype=torch.bool), 0.0), 0),
        (lambda x: x.tanh(), 1),
        (lambda x: x.div(x, rounding_mode="floor"), 2),
        (lambda x: x.add_(1), 1),
        (lambda x: x.relu(), 1),
    ],
)
def test_flop_per_element(function, flop):
    assert cost(lambda: function(meta(8, 8))).flops() == 64 * flop


def test_complex_arithmetic_is_counted_by_its_parts():
    """(a + bi)(c + di): four products, two sums; 64 of them."""
    z = meta(8, 8, dtype=torch.complex64)
    assert cost(lambda: z * z).flops() == 64 * 6
    assert cost(lambda: z + z).flops() == 64 * 2
    assert cost(lambda: z.abs()).flops() == 64 * 4
    assert cost(lambda: torch.polar(meta(8, 8), meta(8, 8)), "polar").flops() == 64 * 4


def test_gelu_moves_its_input_and_output():
    x = meta(1024, 1024, dtype=torch.bfloat16)
    assert cost(lambda: torch.nn.functional.gelu(x)).bytes() == 2 * (1024 * 1024) * 2


def test_the_same_operand_twice_is_read_once():
    x = meta(64, 64)
    assert cost(lambda: x * x).bytes() == 4 * (64 * 64 + 64 * 64)
    assert cost(lambda: x * meta(64, 64)).bytes() == 4 * 3 * 64 * 64


def test_two_halves_of_one_tensor_are_both_read_though_they_look_alike():
    def halves():
        a, b = meta(64, 64).chunk(2)
        return a * b

    assert cost(halves, "mul").bytes() == 4 * (32 * 64 + 32 * 64 + 32 * 64)
    op = view(halves, "mul")
    assert op.inputs[0] == op.inputs[1] and op.streamed().bytes() == 3 * 4 * 32 * 64


def test_a_broadcast_operand_is_read_as_it_is_stored():
    assert cost(lambda: meta(64, 64) + meta(64)).bytes() == 4 * (64 * 64 + 64 + 64 * 64)


def test_in_place_reads_and_writes():
    assert cost(lambda: meta(64).add_(meta(64))).bytes() == 4 * (64 + 64 + 64)


def test_an_out_argument_is_not_read():
    out = meta(64)
    assert cost(lambda: torch.add(meta(64), meta(64), out=out)).bytes() == 4 * (64 + 64 + 64)


def test_glu_backward_counts_each_pair_once():
    """s = 1 / (1 + exp(-y)) is 4, s g is 1, (1 - s) s g x is 4; for 32 incoming values."""
    found = cost(lambda: torch.ops.aten.glu_backward(meta(4, 8), meta(4, 16), -1))
    assert found.flops() == 32 * 9
