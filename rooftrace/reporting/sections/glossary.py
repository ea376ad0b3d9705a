"""The fixed part of report.md: definitions that hold for every report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftrace.reporting.view import model as view

if TYPE_CHECKING:
    from rooftrace.reporting.sections.results import Results

HOW_TO_READ = """
One multiply-add is 2 FLOP. Traffic and bandwidth are decimal (1 GB = 10^9 byte), capacity is binary
(1 GiB = 2^30 byte). Every rate is dense; rates that count on 2:4 sparsity are never used.

| Word | Meaning |
| --- | --- |
| FLOP | what the step computes, attention counted dense, recomputation left out |
| HBM | bytes through HBM: whose bytes they are is the role |
| FLOP/byte | computed FLOP (masked blocks that a kernel skips left out) over HBM bytes |
| compulsory floor | unique bytes that any execution moves: inputs and weights in, results out |
| t_comp, t_hbm | seconds of all work at the peaks, of all bytes at full bandwidth |
| t_bound | the largest of them: a lower bound, as if everything overlapped perfectly |
| t_serial | sum over kernels of the largest of their own terms, and a gap after each |
| t_est | end of the step when the host enqueues and the device runs, both in order |
| launch | kernel gaps, and time in which the device waits for the host |
| limited by | share of t_est in kernels of that regime; the largest and the next |
| MFU, HFU | matrix FLOP over t_est and the dense peak, without and with recomputation |
| naive | attention scores through HBM, nothing fused, one host dispatch per op |
| efficient | flash attention, groups fused as found in the graph, launched as one graph |
| ridge | FLOP/byte at which a chip's peak and bandwidth take equally long |
| family | what kind of work an op is: attention, dense, moe, norm, ... |
| role | whose bytes: weights, activations, kv, gradients, optimizer, temporary, constants |
| kind of a fact | datasheet, measured, derived or guess |

t_bound <= t_serial <= t_est. Memory is what is alive at the peak of the step, not what moves:
the tensors of an eager run. Saved for backward: activations that forward makes and backward reads.
"""


def glossary(results: Results) -> view.Section:
    """How to read a report."""
    note = view.Note(HOW_TO_READ.strip(), lines=True)
    return view.Section(title="How to read this report", parts=[note])
