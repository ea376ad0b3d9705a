"""Kernels of state-space models: recurrences over tokens, and causal convolutions.

FLOPs are those of the recurrence as it is computed, an exponential being one (see `elementwise`).
Bytes are what each kernel reads and writes, once: of a scan over all tokens that are the operands
and y, since the states stay on the chip.  State-space duality is five kernels, which write for each
other (state-spaces/mamba, `ssd_combined.py`).

Sizes: B sequences, S tokens, H heads of P numbers, N numbers of a state for each, G groups, L
tokens of a chunk.
"""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import product_precision, vector, widths
from rooftrace.costmodels.rules.elementwise import FORMULAS, flop_per_element

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
    """Flop for each y beside the recurrence: D x, the gate."""
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
    whole, rest = divmod(tokens, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


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
