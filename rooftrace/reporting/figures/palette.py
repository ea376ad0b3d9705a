"""Colours that mean the same on every output: what limits, phases, families of ops, kinds of bytes.

The four never share a tone: limiters have the strong tones of Okabe and Ito's palette, families
the muted and kinds the light ones of Paul Tol's.  All stay apart for colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Mapping

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
GREY = "#999999"
LEAST_LIGHT = 120  # of 255: what a tone needs to be seen on a dark page

LIMITS: Mapping[str, str] = {"compute": GREEN, "hbm": BLUE, "network": PINK, "launch": ORANGE}
PHASES: Mapping[str, str] = {
    "training": "#D55E00",
    "prefill": "#6A3D9A",
    "decode": "#C2185B",
    "forward": "#8C6D31",
}
FAMILIES: Mapping[str, str] = {
    "attention": "#332288",
    "moe": "#882255",
    "dense": "#DDCC77",
    "head": "#CC6677",
    "convolution": "#999933",
    "rnn": "#88CCEE",
    "norm": "#44AA99",
    "embedding": "#AA4499",
    "elementwise": "#117733",
    "loss": "#661100",
    "optimizer": "#6699CC",
    "communication": "#5C5C5C",
}
ROLES: Mapping[str, str] = {
    "weights": "#77AADD",
    "activations": "#EE8866",
    "kv": "#BBCC33",
    "gradients": "#FFAABB",
    "optimizer": "#EEDD88",
    "temporary": "#99DDFF",
    "constants": "#CCCCCC",
}
KINDS: Mapping[str, str] = {**ROLES, "saved": "#44BB99", "optimizer temporaries": "#AAAA00"}
"""Roles, with what is saved for backward and what an optimizer drops apart."""


def on_dark(colour: str) -> str:
    """A colour for a dark page: as it is where it is light enough, else mixed with white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    light = 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]
    share = max(0.0, (LEAST_LIGHT - light) / (255 - light))
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)
