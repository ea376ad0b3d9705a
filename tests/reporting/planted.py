"""Findings, each planted in a small model, and the same model mended by hand.

A pair has a module with the finding and one without it, their inputs, and how both are run.  On a
GPU that is:

    from tests.reporting.planted import PAIRS
    for pair in PAIRS:
        for way in (pair.planted, pair.mended):
            step = way.step("cuda")  # a function without arguments; 5 to 50 ms on an H100
            ...                      # call it 10 times, then time 50 calls between two events

The line of the finding ends with a comment, "planted: <name>".
"""

from __future__ import annotations

from tests.reporting.planted_calls import CALLS
from tests.reporting.planted_kernels import KERNELS

PAIRS = (*KERNELS, *CALLS)
