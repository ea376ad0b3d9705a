"""The fixed part of report.md: definitions that hold for every report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.reporting.sections.results import Results

RULES = (
    "One multiply-add is 2 FLOP. Traffic and bandwidth are decimal (1 GB = 10^9 byte), capacity is "
    "binary (1 GiB = 2^30 byte). Every rate is dense; rates that count on 2:4 sparsity are never "
    "used."
)
WORDS = {
    "FLOP": "what the step computes, attention counted dense, recomputation left out",
    "attention's backward": words.ATTENTION_BACKWARD,
    "HBM": "bytes through HBM: whose bytes they are is the role",
    "FLOP/byte": "computed FLOP (masked blocks that a kernel skips left out) over HBM bytes",
    "compulsory floor": "unique bytes that any execution moves: inputs and weights in, results out",
    "expected": "t_est: seconds at the rates that real kernels reach (knobs), with the host",
    "90 % within": "where nine of ten measured steps should lie; wide without a fit to the chip",
    "bound": "no step is faster: datasheet rates, as if everything overlapped perfectly (t_bound)",
    "t_comp, t_hbm": "seconds of all work, and of all bytes, at the rates of the step's time",
    "t_serial": "sum over kernels of what each takes, and a gap after each",
    "t_est": "end of the step when host and device go in order; a bound with `--knobs none`",
    "launch": "kernel gaps, and time in which the device waits for the host",
    "limited by": "share of the step in kernels of that regime; the largest and the next",
    "MFU, HFU": "matrix FLOP over t_est and the dense peak, without and with recomputation",
    "naive": "attention scores through HBM, nothing fused, one host dispatch per op",
    "efficient": "flash attention and other kernels of libraries, groups fused as found in the "
    "graph, launched as one graph",
    "ridge": "FLOP/byte at which a chip's peak and bandwidth take equally long",
    "family": "what kind of work an op is: attention, dense, moe, norm, ...",
    "role": "whose bytes: weights, activations, kv, gradients, optimizer, temporary, constants",
    "kind of a fact": "datasheet, measured, derived or guess",
}
ORDER = (
    "t_bound <= t_est, and t_serial <= t_est. Memory is what is alive at the peak of the step, not "
    "what moves: the tensors of a run under the execution that is broken down. Saved for backward: "
    "activations that forward makes and backward reads."
)


def glossary(results: Results) -> view.Section:
    """How to read a report."""
    columns = [
        view.Column("word", units.TEXT, "Word"),
        view.Column("meaning", units.TEXT, "Meaning"),
    ]
    rows = [{"word": word, "meaning": meaning} for word, meaning in WORDS.items()]
    table = view.Table(columns=columns, rows=rows, padded=False)
    parts: list[view.Part] = [view.Note(RULES), table, view.Note(ORDER)]
    return view.Section(title="How to read this report", parts=parts)
