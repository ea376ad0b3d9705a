"""Calls into libraries and the ops that they are for: in order, by name and sizes of operands."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from rooftrace.measured.alignment import keys
from rooftrace.measured.traces import records

_PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "linear_pointwise",
        "mkl_linear",
        "addmm_activation",
        "int_mm",
    ]
)
_WITH_BIAS = frozenset({"addmm", "baddbmm", "addmm_activation"})
_OPERANDS = {"convolution": 2, "convolution_backward": 3}
"""How many tensors tell two calls of one name apart; of other names it is the first."""
_FAMILIES = {
    "convolution_pointwise": "convolution",
    "cudnn_convolution": "convolution",
    "miopen_convolution": "convolution",
    "cudnn_convolution_add_relu": "convolution",
    "cudnn_convolution_relu": "convolution",
    "convolution_overrideable": "convolution",
    "convolution_backward_overrideable": "convolution_backward",
}
_KERNELS = (
    ("attention_backward", re.compile(r"(flash|fmha|attention|sdp).*(bwd|backward)", re.I)),
    ("attention", re.compile(r"flash|fmha|attention|_sdp", re.I)),
    ("convolution_backward", re.compile(r"dgrad|wgrad|bwd_(data|weight)", re.I)),
    ("convolution", re.compile(r"fprop|conv", re.I)),
    ("product", re.compile(r"gemm|cutlass|cublas|cijk|nvjet|xmma|matmul|gemv", re.I)),
)
"""The family of a kernel of a library by its own name, where no op of the host names it."""


def family(name: str) -> str:
    """One name for ops that stand for each other: "product" for "aten::mm" and "aten::addmm"."""
    plain = keys.common_name(name).rpartition("::")[2].strip("_")
    return "product" if plain in _PRODUCTS else _FAMILIES.get(plain, plain)


def kernel_family(name: str) -> str:
    """The family of a library's kernel by its own name; "" where that does not say."""
    if "::" in name and "(" not in name and "<" not in name:
        return family(name)
    return next((known for known, pattern in _KERNELS if pattern.search(name)), "")


def operands(name: str, shapes: Sequence[records.Shape]) -> keys.Key:
    """A key by which calls and ops of one family with equal operands are equal."""
    group = family(name)
    plain = keys.common_name(name).rpartition("::")[2].strip("_")
    if group == "product":
        left = shapes[plain in _WITH_BIAS :]
        if len(left) < 2 or not left[0] or not left[1]:
            return group, ()
        a, b = left[0], left[1]
        columns = b[0] if plain.startswith(("linear", "mkl_linear")) else b[-1]
        return group, ((math.prod(a[:-1]), a[-1], columns),)
    return group, tuple(shapes[: _OPERANDS.get(group, 1)])


def paired(
    called: Sequence[tuple[int, keys.Key]], ops: Sequence[tuple[int, keys.Key]]
) -> dict[int, int]:
    """The op of each call by its place.

    In order by family and operands; between two pairs by family alone; what is left by family and
    operands in any order.
    """
    have, wanted = [key for _, key in called], [key for _, key in ops]
    pairs = keys.common(have, wanted)
    names, own_names = [key[0] for key in have], [key[0] for key in wanted]
    swapped = list(_in_any_order(pairs, have, wanted))
    taken = {b for _, b in swapped}
    placed = {a for a, _ in swapped}
    more = [
        (a, b)
        for a, b in keys.between(pairs, names, own_names)
        if a not in placed and b not in taken
    ]
    return {called[a][0]: ops[b][0] for a, b in (*pairs, *swapped, *more)}


def _in_any_order(
    pairs: Iterable[tuple[int, int]], have: Sequence[keys.Key], wanted: Sequence[keys.Key]
) -> Iterable[tuple[int, int]]:
    """More pairs of equal keys with operands, the first of those that are left each time."""
    pairs = list(pairs)
    done, taken = {a for a, _ in pairs}, {b for _, b in pairs}
    left: dict[keys.Key, deque[int]] = defaultdict(deque)
    for number, key in enumerate(wanted):
        if number not in taken and key[1]:
            left[key].append(number)
    for place, key in enumerate(have):
        if place not in done and left[key]:
            yield place, left[key].popleft()
