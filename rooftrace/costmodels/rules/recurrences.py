"""Rules of recurrent kernels: state-space models, causal convolutions, delta rules, RNNs."""

from __future__ import annotations

from dataclasses import dataclass

from rooftrace.costmodels.ops import Cost, OpView, TensorView, Work, builtin
from rooftrace.costmodels.rules.common import (
    product_precision,
    stored_width,
    vector,
    vector_precision,
    widths,
)
from rooftrace.costmodels.rules.elementwise import FORMULAS, flop_per_element

# -- state-space models ----------------------------------------------------------------------------
# Kernels of state-space models: recurrences over tokens, and causal convolutions.
#
# FLOPs are those of the recurrence as it is computed, an exponential being one (see `elementwise`).
# Bytes are those that each kernel reads and writes, once: of a scan over all tokens the operands
# and y, since the states stay on the chip.  State-space duality is five kernels, which write for
# each other (state-spaces/mamba, `ssd_combined.py`).
#
# Sizes: B sequences, S tokens, H heads of P numbers, N numbers of a state for each, G groups, L
# tokens of a chunk.

SILU = flop_per_element(FORMULAS["silu"])
SOFTPLUS = flop_per_element(FORMULAS["softplus"])
STATE = 7
"""Flop for each number of a state and token: dt A, its exponential, dt x times B, two to multiply
and add to the state, two to multiply by C and add up (arXiv 2312.00752, algorithm 2)."""


def _steps(op: OpView) -> int:
    """Flop for each dt: a bias, softplus, two limits, as far as the op has them."""
    limits = sum(op.attribute(name) is not None for name in ("low", "high"))
    softplus = SOFTPLUS if op.attribute("softplus", False) else 0
    return (op.tensor("dt_bias") is not None) + softplus + limits


def _ending(op: OpView) -> int:
    """Flop for each y besides the recurrence: D x, the gate."""
    return 2 * (op.tensor("D") is not None) + (SILU + 1) * (op.tensor("z") is not None)


def _scanned(op: OpView) -> Cost:
    x, b = op.needed("x"), op.needed("B")
    states = x.elements * b.shape[-1]
    flop = STATE * states + (1 + _ending(op)) * x.elements + _steps(op) * op.needed("dt").elements
    return vector(op, flop) + op.streamed()


@builtin("rooftrace.selective_scan", kind="scan", label="selective scan")
def selective_scan(op: OpView) -> Cost:
    """STATE for each of B S H P N; dt x, D x and the gate for each of B S H P.

    Read are x, dt, B, C, z and the parameters, written y and the last state: as the paper has it,
    the states of all tokens are never in memory.
    """
    return _scanned(op)


@builtin("rooftrace.selective_state_update", kind="state update", label="state update")
def selective_state_update(op: OpView) -> Cost:
    """The scan of one token: the state is read and written in its place."""
    return _scanned(op)


def _pairs(tokens: int, chunk: int) -> int:
    """Pairs (l, s) of tokens of one chunk with s <= l, over all chunks of a sequence."""
    full, rest = divmod(tokens, chunk)
    return full * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


@builtin("rooftrace.ssd_steps", kind="ssd", label="ssd: steps")
def ssd_steps(op: OpView) -> Cost:
    """dt, dt A and its running sum, for each of B S H."""
    return vector(op, (_steps(op) + 2) * op.needed("dt").elements) + op.streamed()


@builtin("rooftrace.ssd_states", kind="ssd", label="ssd: states")
def ssd_states(op: OpView) -> Cost:
    """B^T x of each chunk: 2 B S H P N; x or B times the decay to the end of its chunk.

    The decays take a difference, an exponential and two products for each of B S H.
    """
    x, keys = op.needed("x"), op.needed("B")
    batch, tokens, heads, width = x.shape
    size = keys.shape[-1]
    product = Cost.of(
        matmul=2 * x.elements * size, precision=product_precision(x, keys), rows=width,
        columns=size, inner=min(tokens, op.needed("sums").shape[-1]), widths=widths(x, keys),
    )  # fmt: skip
    return product + vector(op, batch * tokens * heads * (3 + size)) + op.streamed()


@builtin("rooftrace.ssd_passing", kind="ssd", label="ssd: passing states")
def ssd_passing(op: OpView) -> Cost:
    """Two for each number of the states of all chunks.  Of the sums it reads the last of each."""
    sums, states = op.needed("sums"), op.needed("states")
    last = sums.nbytes // sums.shape[-1]
    others = op.read_all((states, op.tensor("state"))) + op.write_all(op.outputs)
    return vector(op, 2 * states.elements) + op.read(sums, last) + others


@builtin("rooftrace.ssd_products", kind="ssd", label="ssd: C B")
def ssd_products(op: OpView) -> Cost:
    """C B^T of all pairs of a chunk: 2 B S L G N."""
    queries, keys = op.needed("C"), op.needed("B")
    chunk, tokens, size = int(op.attribute("chunk")), queries.shape[1], queries.shape[-1]
    side = min(chunk, tokens)
    product = Cost.of(
        matmul=2 * queries.elements * chunk, precision=product_precision(queries, keys),
        rows=side, columns=side, inner=size, widths=widths(queries, keys),
    )  # fmt: skip
    return product + op.streamed()


@builtin("rooftrace.ssd_output", kind="ssd", label="ssd: output")
def ssd_output(op: OpView) -> Cost:
    """y = (C B^T * decays) x over the pairs with s <= l, and C times the states of before.

    2 P for each head and pair, 2 B S H P N.  The decays of the pairs take a difference, an
    exponential and two products each; those of the start of the chunk one each, and one for each
    of y.
    """
    x, queries = op.needed("x"), op.needed("C")
    batch, tokens, heads, width = x.shape
    chunk, size = op.needed("sums").shape[-1], queries.shape[-1]
    pairs = batch * heads * _pairs(tokens, chunk)
    precision, sides = product_precision(x, queries), widths(x, queries)
    rows = min(chunk, tokens)
    return (
        Cost.of(matmul=2 * pairs * width, precision=precision, rows=rows, columns=width,
                inner=rows, widths=sides)
        + Cost.of(matmul=2 * x.elements * size, precision=precision, rows=rows, columns=width,
                  inner=size, widths=sides)
        + vector(op, 4 * pairs + batch * tokens * heads + (2 + _ending(op)) * x.elements)
        + op.streamed()
    )  # fmt: skip


def _convolved(op: OpView, x: TensorView) -> Cost:
    """2 K for each result; a bias, SiLU."""
    each = 2 * op.needed("weight").shape[1] + (op.tensor("bias") is not None)
    each += SILU if op.attribute("activation", "") == "silu" else 0
    return vector(op, each * x.elements) + op.streamed()


@builtin("rooftrace.causal_conv1d", kind="elementwise", family="convolution",
         label="causal conv1d")
def causal_conv1d(op: OpView) -> Cost:
    """y[B, C, S] of x[B, C, S] and w[C, K]: the zeros before the first token count as data."""
    return _convolved(op, op.needed("x"))


@builtin("rooftrace.causal_conv1d_update", kind="elementwise", family="convolution",
         label="causal conv1d update")
def causal_conv1d_update(op: OpView) -> Cost:
    """The causal convolution of the next tokens; the state is read and written in its place."""
    return _convolved(op, op.needed("x"))


# -- delta rules -----------------------------------------------------------------------------------
# Linear attention and delta rules as the kernels of flash-linear-attention (fla) run them.
#
# A prompt goes in chunks of 64 tokens through a family of kernels (S. Yang et al., arXiv
# 2312.06635, 2406.06484, 2412.06464).  Their results for the next one go through memory,
# and counts as bytes of the result.  Rows of a chunk that is not full are computed too.  One
# token goes through one kernel, which reads and writes the state.  The kernels count as one
# launch: the gaps between those of a family are not in its time.

CHUNK = 64
"""Tokens of a chunk, in fla and in vLLM."""
TURN = 4
"""Waits for memory in a turn from one chunk to the next: two loads of operands, each behind a
product (about 1.1 us by `engines.WAIT`; a guess)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Sizes of one call: B requests of T tokens, H heads with states [K, V], h heads of keys.

    width: bytes of an element of the operands.  channels: a decay for each channel of the keys.
    """

    batch: int
    tokens: int
    heads: int
    key_heads: int
    key: int
    value: int
    width: float
    delta: bool
    decays: bool = True
    channels: bool = False
    norms: int = 0  # how many of query and key are divided by their length

    @property
    def turns(self) -> int:
        """Chunks of a request."""
        return -(-self.tokens // CHUNK)

    @property
    def rows(self) -> int:
        """Rows of all chunks and heads."""
        return self.batch * self.heads * self.turns * CHUNK


def chunked_flop(s: StateSizes) -> int:
    """FLOP of the matrix products of all chunks, by row of a chunk.

    Both: q S and k^T v (2 K V each), q k^T (2 C K) and its product with v (2 C V).  Delta: k k^T
    (2 C K), w = A (beta k) and u = A (beta v) (2 C K + 2 C V), and w S (2 K V).
    """
    each = 4 * s.key * s.value + 2 * CHUNK * (s.key + s.value)
    if s.delta:
        each += 2 * CHUNK * s.key + 2 * CHUNK * (s.key + s.value) + 2 * s.key * s.value
    return s.rows * each


def chunked_vector(s: StateSizes) -> int:
    """FLOP by elements, by row: decays of C pairs (2, once for q k^T, once for k k^T), of q and k,
    the inverse of a triangle (C^2 / 3), beta, norms (3) and differences."""
    each = 2 * CHUNK + (s.key if s.decays else 0) + s.value
    if s.delta:
        each += 2 * CHUNK + CHUNK * CHUNK // 3 + 2 * (s.key + s.value)
    return s.rows * each + 3 * s.norms * s.batch * s.tokens * s.key_heads * s.key


def between(s: StateSizes) -> tuple[float, float]:
    """Bytes that kernels of a chunked family write for others, and those that are read again.

    Sums of decays (fp32); normed q, k; A in fp32 and its inverse, w, u (delta); the state at the
    beginning of each chunk; v behind the delta.  Keys are read by the kernels for k k^T, w and u,
    the states, and the results.
    """
    tokens, w = s.batch * s.tokens, s.width
    decays = 4 * tokens * s.heads * (s.key if s.channels else 1) if s.decays else 0
    keys, values = w * tokens * s.key_heads * s.key, w * tokens * s.heads * s.value
    states = w * s.batch * s.heads * s.turns * s.key * s.value
    written, read = decays + s.norms * keys + states, 2 * decays + s.norms * keys + states
    if not s.delta:
        return written, read + keys + values  # for the states, and for the results
    pairs = tokens * s.heads * CHUNK
    wide = w * tokens * s.heads * s.key
    written += 4 * pairs + w * pairs + wide + 2 * values
    read += 4 * pairs + w * pairs + wide + 2 * values + 3 * keys + 2 * decays
    return written, read


@builtin("rooftrace.block_attention", kind="bmm", family="attention", label="linear attention")
def block_attention(op: OpView) -> Cost:
    """`linear_attention` whose decays are given as tables, which the kernels do without: they make
    them of the H rates."""
    return _priced(op, _sizes(op), ("query", "key", "value", "rate", "state"))


@builtin("rooftrace.linear_attention", "rooftrace.linear_attention_", kind="bmm",
         family="attention", label="linear attention")
def linear_attention(op: OpView) -> Cost:
    """`delta_rule` without a delta: one token takes 5 K V flop on the vector engine.  A bonus of a
    token in its own result is not counted."""
    return _priced(op, _sizes(op), ("query", "key", "value", "decay", "bonus", "state"))


@builtin("rooftrace.delta_rule", "rooftrace.delta_rule_", kind="bmm", family="attention",
         label="delta rule")
def delta_rule(op: OpView) -> Cost:
    """o[B, T, H, V] and the last state [B, H, K, V] of query, key [B, T, h, K], value, decay, beta.

    One token: decay, S^T k, the difference, the outer product and S^T q take 7 K V + 3 V flop on
    the vector engine.
    """
    return _priced(op, _sizes(op), ("query", "key", "value", "decay", "beta", "state"))


def _priced(op: OpView, s: StateSizes, read: tuple[str, ...]) -> Cost:
    moved = op.read_all(t for _, t in op.operands(only=read)) + op.write_all(op.outputs)
    if s.tokens == 1:
        each = (7 if s.delta else 5) * s.key * s.value + (3 * s.value if s.delta else 0)
        flop = s.batch * s.heads * each
        return Cost.of(vector=flop, precision=vector_precision(op)) + moved
    precision = product_precision(op.needed("query"), op.needed("key"), op.needed("value"))
    products = Cost.of(
        matmul=chunked_flop(s), precision=precision, rows=CHUNK, columns=s.value, inner=s.key
    )
    written, again = between(s)
    out = op.outputs[0]
    state = s.batch * s.heads * s.key * s.value
    waits = Work("vector", vector_precision(op), state, inner=1 / TURN)
    return (products + Cost.of(vector=chunked_vector(s), precision=vector_precision(op))
            + Cost({waits: s.turns * state})
            + moved + op.write(out, round(written)) + op.read(out, round(again)))


def _sizes(op: OpView) -> StateSizes:
    query, value, decay = op.needed("query"), op.needed("value"), op.tensor("decay")
    batch, tokens, heads, columns = value.shape
    norms = sum(op.attribute(name) is not None for name in ("query_norm", "key_norm"))
    return StateSizes(
        batch=batch, tokens=tokens, heads=heads, key_heads=query.shape[2], key=query.shape[3],
        value=columns, width=stored_width(value), delta=op.tensor("beta") is not None,
        decays=decay is not None and decay.dim > 2, norms=norms,
        channels=decay is not None and decay.dim in (2, 4),
    )  # fmt: skip


# -- recurrent networks, by cuDNN and by the cell --------------------------------------------------

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
"""Waits for memory of a time step of a layer: two kernels in a row, a product and the pointwise
ops, each with a launch (about 5.6 us in all by `engines.WAIT`; a guess for cuDNN's plain
algorithm, whose persistent ones may take less)."""


def _rnn_sizes(op: OpView, mode: str) -> tuple[int, int]:
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
    steps, batch = _rnn_sizes(op, mode)
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


# -- cells: the pointwise ops after the products ---------------------------------------------------


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
