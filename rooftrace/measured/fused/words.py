"""The words in the name of a kernel, and those under which an op of our graph stands in one.

Inductor names a kernel after the ops that its nodes were decomposed from: their names without
namespace and overload, sorted, each once, joined by underscores, with a number behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from rooftrace.costmodels.registry import find_rule
from rooftrace.measured.alignment import keys
from rooftrace.tracer.graph import Op

_GRAPH = re.compile(r"^graph_\d+_")
"""What Inductor writes before the name of a kernel in the profiler's range on a CPU."""
_WRITTEN = re.compile(
    r"^(?:\w+?_)?(?:cpp|mps|(?:triton|pallas|halide|cutedsl)_[a-z]{2,4})_fused(?:_(\w*?))??(?:_(\d+))?$"
)
_LONGEST = 9
"""As many pieces between underscores does the name of an op have at most."""
_ELSEWHERE, _NO_OP, _UNSORTED = 2.2, 4.0, 3.0
"""What it costs to read an op that is not in the graph, a piece that is in no op's name, and an op
that is not in order; an op of the graph costs 1."""
_ALSO: Mapping[str, frozenset[str]] = {
    "batch_norm": frozenset({"native_batch_norm_legit", "native_batch_norm_legit_functional"}),
    "rms_norm": frozenset({"fused_rms_norm", "rsqrt"}),
    "rms_norm_backward": frozenset({"fused_rms_norm_backward", "pow"}),
    "attention": frozenset({"softmax", "safe_softmax", "bmm", "baddbmm"}),
    "attention_backward": frozenset({"softmax_backward_data", "bmm"}),
    "rnn": frozenset({"mkldnn_rnn_layer", "tanh", "sigmoid"}),
    "rnn_backward": frozenset({"mkldnn_rnn_layer_backward", "tanh_backward", "sigmoid_backward"}),
    "select_backward": frozenset({"select_scatter"}),
    "slice_backward": frozenset({"slice_scatter"}),
    "upsample_nearest2d": frozenset({"unsafe_index"}),
    "upsample_nearest2d_backward": frozenset({"unsafe_index_put"}),
}
"""Other names under which a compiler has an op of ours, and what it takes it apart into."""


@dataclass(frozen=True, slots=True)
class KernelWords:
    """The ops that the name of a kernel lists."""

    words: frozenset[str]  # without underscores around them: "softmax" of "_softmax"
    start: str = ""  # of one more op, where the name is cut
    number: int | None = None  # of the kernel among those of its graph

    def names(self, words: frozenset[str]) -> bool:
        """Whether the name has one of these."""
        return not self.words.isdisjoint(words) or bool(
            self.start and any(word.startswith(self.start) for word in words)
        )


def plain_name(name: str) -> str:
    """The name of a kernel without the number of its graph."""
    return _GRAPH.sub("", name)


def is_generated(name: str) -> bool:
    """Whether a call in a trace is of a kernel that Inductor wrote."""
    return _WRITTEN.match(plain_name(name)) is not None


class Vocabulary:
    """Reads the names of kernels of a step, given the names of the ops in its graph.

    "index_select" may be one op or two: those of the graph are preferred.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._own = frozenset(op.name.partition(".")[2].strip("_") for op in ops)
        self._read: dict[str, KernelWords] = {}

    def words(self, name: str) -> KernelWords:
        """What the name of a kernel lists: of one that Inductor wrote, or of a library's call."""
        if name not in self._read:
            self._read[name] = self._of(name)
        return self._read[name]

    def _of(self, name: str) -> KernelWords:
        match = _WRITTEN.match(plain_name(name))
        if match is None:
            return KernelWords(frozenset({_common(keys.common_name(name).rpartition("::")[2])}))
        listed, number = match.groups()
        read = self._split((listed or "").split("_"))
        start = ""
        if number is None:
            whole = len(read)
            while whole and self._price(read[whole - 1]) > _ELSEWHERE:
                whole -= 1
            if whole == len(read) and self._price(read[-1]) > 1:  # "tan" may be cut "tanh"
                whole -= 1
            start = "_".join(read[whole:]).lstrip("_")
            read = read[:whole]
        words = frozenset(_common(word) for word in read if word.strip("_"))
        return KernelWords(words, start, None if number is None else int(number))

    def _split(self, pieces: Sequence[str]) -> list[str]:
        """The words of a name that is cut at underscores: as few, and as well sorted, as can be."""
        best: list[dict[str, tuple[float, tuple[str, ...]]]] = [{} for _ in range(len(pieces) + 1)]
        best[0][""] = (0.0, ())
        for begin in range(len(pieces)):
            for last, (cost, before) in best[begin].items():
                for end in range(begin + 1, min(begin + _LONGEST, len(pieces)) + 1):
                    word = "_".join(pieces[begin:end])
                    known = _is_op(word)
                    if not known and end > begin + 1:
                        continue
                    price = cost + self._price(word) + _UNSORTED * (known and word <= last)
                    key = word if known else last
                    if key not in best[end] or price < best[end][key][0]:
                        best[end][key] = (price, (*before, word))
        return list(min(best[-1].values())[1])

    def _price(self, word: str) -> float:
        """What it costs to read this word."""
        if word.strip("_") in self._own:
            return 1.0
        return _ELSEWHERE if _is_op(word) else _NO_OP if word else 0.5


def _common(word: str) -> str:
    """One word for all names of an op: "attention" of "_scaled_dot_product_flash_attention"."""
    return keys.common_name(f"aten::{word}").rpartition("::")[2].strip("_")


@cache
def op_words(op_name: str) -> frozenset[str]:
    """The words under which an op stands in the name of a kernel: "gelu" for "aten.gelu"."""
    word = op_name.partition(".")[2].strip("_")
    also = _ALSO.get(_common(word), frozenset()) | _ALSO.get(word, frozenset())
    return frozenset(map(_common, {word, *also}))


def words_of(op: Op) -> frozenset[str]:
    """The words under which this op of a graph stands in the name of a kernel."""
    return op_words(op.name)


@cache
def _is_op(word: str) -> bool:
    """Whether there is an op of this name."""
    if not word.strip("_"):
        return False
    if word.strip("_") in _OTHERS:
        return True
    return any(find_rule(f"{space}.{word}.default") is not None for space in ("aten", "prims"))


_OTHERS = frozenset(word for also in _ALSO.values() for word in also) | _ALSO.keys()
