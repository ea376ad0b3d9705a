"""Recurrent networks, whole (as cuDNN runs them) and by the cell.

Weights count once.  They are used again in every time step: a kernel that cannot keep them on chip
reads them again from L2 or memory, which is not modelled.  Gates go through memory between the
products and what is done by elements: both products write theirs, as the product with x is one for
all time steps, and that with h one for each (J. Appleyard et al., "Optimizing Performance of
Recurrent Neural Networks on GPUs", arXiv 1604.01946, which cuDNN follows).  They count as bytes of
the output.  Outputs of inner layers are not counted.  Steps of time follow one another, so that a
network takes `WAITS` for each of them, however small its products are.
"""

from __future__ import annotations

from rooftrace.costmodels.ops import Cost, OpView, TensorView, Work, builtin
from rooftrace.costmodels.rules.common import (
    product_precision,
    stored_width,
    vector,
    vector_precision,
)

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
POINTWISE = {
    # Four gates: an add each of the two products, three sigmoids (4), two tanh, c' = f c + i g, o
    # tanh c'.
    "lstm": 4 + 3 * 4 + 2 + 3 + 1,
    # Three adds of products, two sigmoids, r * h part, tanh, (1 - z) n + z h.
    "gru": 3 + 2 * 4 + 1 + 1 + 4,
    # One add, one function.
    "rnn_tanh": 2,
    "rnn_relu": 2,
}
"""Flop per hidden value and time step, besides biases (two adds per gate)."""
CUDNN_MODES = {0: "rnn_relu", 1: "rnn_tanh", 2: "lstm", 3: "gru"}


def _weights(op: OpView) -> tuple[tuple[TensorView, ...], int]:
    """All weights and biases, and how many belong to one layer and direction."""
    params = op.tensors("params") or op.tensors("weight")
    directions = 2 if op.attribute("bidirectional", False) else 1
    return params, max(len(params) // (int(op.attribute("num_layers", 1)) * directions), 1)


WAITS = 20
"""Waits for memory of a time step of a layer: two kernels in a row, a product and what is done by
elements, each with a launch (about 5.6 us in all by `engines.WAIT`; a guess for cuDNN's plain
algorithm, whose persistent ones may take less)."""


def _sizes(op: OpView, mode: str) -> tuple[int, int]:
    """(rows over all time steps, rows of one time step)."""
    x = op.needed("input", "data")
    state = op.tensor("hx") or op.tensors("hx")[0]
    batch = state.shape[-2] if state.dim > 1 else 1
    return x.elements // x.shape[-1], batch


def _products(op: OpView, params: tuple[TensorView, ...], group: int, steps: int, batch: int,
              precision: str, backward: bool = False) -> Cost:
    """x W^T for all steps at once, h W^T and a projection by step: 2 rows a b per W[a, b]."""
    cost, x = Cost(), op.needed("input", "data")
    for position, weight in enumerate(params):
        if weight.dim != 2:
            continue
        a, b = weight.shape
        first = position % group == 0
        flop = 2 * steps * a * b
        cost += Cost.of(matmul=flop, precision=precision, rows=steps if first else batch,
                        columns=a, inner=b, widths=(stored_width(x), stored_width(weight)))
        if backward:
            cost += Cost.of(matmul=flop, precision=precision, rows=a, columns=b, inner=steps)
    return cost


def _network(op: OpView, mode: str, backward: bool) -> Cost:
    params, group = _weights(op)
    steps, batch = _sizes(op, mode)
    matrices = [w for w in params if w.dim == 2]
    hidden = sum(w.shape[0] for i, w in enumerate(params) if i % group == 0) // GATES[mode]
    biases = 2 * GATES[mode] if len(matrices) < len(params) else 0
    each = POINTWISE[mode] + biases
    products = _products(op, params, group, steps, batch,
                         product_precision(op.needed("input", "data"), *matrices), backward)
    each *= 2 if backward else 1
    # A step waits for the one before, in every layer; directions go side by side.
    inner = each / (int(op.attribute("num_layers", 1)) * WAITS)
    flop = steps * hidden * each
    turns = Work("vector", vector_precision(op), batch * hidden, inner=inner)
    pointwise = Cost({turns: flop}) if flop else Cost()
    return products + pointwise + op.streamed() + _gates(op, steps * hidden * GATES[mode], backward)


def _gates(op: OpView, values: int, backward: bool) -> Cost:
    """Both parts of the gates written and read; in backward their values read, their gradients
    written, and read for those of x, of h and of both weights."""
    place = op.outputs[0]
    size = round(values * stored_width(place))
    write, read = (1, 5) if backward else (2, 2)
    return op.write(place, write * size) + op.read(place, read * size)


def _mode(op: OpView) -> str:
    """From the attribute (ours is a name, cuDNN's a number), else from the op's name."""
    mode = op.attribute("mode")
    if isinstance(mode, int):
        return CUDNN_MODES[mode]
    return str(mode) if mode is not None else op.target.split(".")[1]


@builtin("rooftrace.rnn", kind="rnn", label="rnn")
@builtin("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu",
         "aten._cudnn_rnn", "aten.miopen_rnn", kind="rnn")
def rnn(op: OpView) -> Cost:
    """Per layer and direction: gates[T B, G H] = x W_ih^T + h W_hh^T + biases, then POINTWISE.

    2 T B G H (I + H) flop of matrix work: T B rows for the input's part, B for the hidden state's.
    """
    return _network(op, _mode(op), backward=False)


@builtin("rooftrace.rnn_backward", kind="rnn", label="rnn backward")
@builtin("aten._cudnn_rnn_backward", "aten.miopen_rnn_backward", kind="rnn")
def rnn_backward(op: OpView) -> Cost:
    """Two products for each product of the forward: the gradients of its two operands.

    Pointwise gradients are counted as twice the forward.
    """
    return _network(op, _mode(op), backward=True)


@builtin("aten.mkldnn_rnn_layer", kind="rnn")
def mkldnn_rnn_layer(op: OpView) -> Cost:
    """One layer and direction: weight0 is W_ih, weight1 is W_hh."""
    mode = CUDNN_MODES[int(op.attribute("mode", 2))]
    x, matrices = op.needed("input"), (op.needed("weight0"), op.needed("weight1"))
    steps = x.elements // x.shape[-1]
    hidden = int(op.attribute("hidden_size"))
    batch = x.shape[0] if op.attribute("batch_first", False) else x.shape[-2]
    products = _products(op, matrices, 2, steps, batch, product_precision(x, *matrices))
    each = POINTWISE[mode] + (2 * GATES[mode] if op.attribute("has_biases", True) else 0)
    return products + vector(op, steps * hidden * each) + op.streamed()


# -- cells: the products are ops of their own, this is what is left --------------------------------


@builtin("aten._thnn_fused_lstm_cell", fusion="pointwise", kind="rnn")
def lstm_cell(op: OpView) -> Cost:
    """Gates from the two products, cell and hidden state."""
    biases = sum(op.tensor(name) is not None for name in ("input_bias", "hidden_bias"))
    each = POINTWISE["lstm"] + GATES["lstm"] * biases
    return vector(op, each * op.needed("cx").elements) + op.streamed()


@builtin("aten._thnn_fused_lstm_cell_backward", "aten._thnn_fused_lstm_cell_backward_impl",
         fusion="pointwise", kind="rnn")
def lstm_cell_backward(op: OpView) -> Cost:
    """Gradients of three sigmoids and two tanh (3 each), and nine products and adds."""
    return vector(op, (3 * 3 + 2 * 3 + 9) * op.needed("cx").elements) + op.streamed()


@builtin("aten._thnn_fused_gru_cell", fusion="pointwise", kind="rnn")
def gru_cell(op: OpView) -> Cost:
    """Gates from the two products, and the hidden state."""
    biases = sum(op.tensor(name) is not None for name in ("input_bias", "hidden_bias"))
    each = POINTWISE["gru"] + GATES["gru"] * biases
    return vector(op, each * op.needed("hx").elements) + op.streamed()


@builtin("aten._thnn_fused_gru_cell_backward", fusion="pointwise", kind="rnn")
def gru_cell_backward(op: OpView) -> Cost:
    """Gradients of two sigmoids (3 each) and a tanh (3), and eight products and adds."""
    return vector(op, (2 * 3 + 3 + 8) * op.needed("grad_hy").elements) + op.streamed()
