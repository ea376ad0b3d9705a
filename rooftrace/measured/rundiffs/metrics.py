"""What is compared of two measured steps."""

from __future__ import annotations

from rooftrace.tracer.changes.metrics import CAPACITY, COUNT, SECONDS, Metrics

METRICS: Metrics = {
    "time": SECONDS,
    "device": SECONDS,
    "computing": SECONDS,
    "exposed": SECONDS,
    "copying": SECONDS,
    "idle": SECONDS,
    "waiting": SECONDS,
    "queued": SECONDS,
    "outside": SECONDS,
    "communication": SECONDS,
    "hidden": SECONDS,
    "work": SECONDS,
    "kernels": COUNT,
    "copies": COUNT,
    "memory": CAPACITY,
}
"""Figures of a step.

time: wall.  device: when any kernel or copy runs, = computing + exposed + copying.  exposed:
communication that no kernel hides; copying: copies under neither.  idle: time - device, = waiting
(the host has not launched the next kernel) + queued (it has) + outside (before, after and beside
its kernels).  communication = hidden + exposed.  work: of all kernels and copies, added up.
On a host device is when any op runs.  memory: at the peak, of a run.
"""
PARTS = ("computing", "exposed", "copying", "waiting", "queued", "outside")
"""Figures that exclude each other and add up to the time of a step of a GPU's trace."""
