"""Names of the classes of kernels; those of one class reach similar shares of a chip's peaks."""

from rooftrace.costmodels.registry import KINDS
from rooftrace.hardware.chip import ENGINES
from rooftrace.hardware.precisions import PRECISIONS, compute_family

LAST = ", channels last"
"""Suffix of the classes for images with channels last, where eager kernels differ.  If a knob file
has no share for such a class, the share of the class without the suffix applies."""
CLASSES = (
    "conv",
    f"conv{LAST}",
    "conv 1x1",
    f"conv 1x1{LAST}",
    "conv 3d",
    "conv, odd channels",
    "grouped conv",
    f"grouped conv{LAST}",
    "depthwise conv",
    "depthwise conv, large",
    "depthwise conv, general",
    "depthwise conv backward",
    "grouped conv backward",
    *KINDS[1:],
)
"""Every class, matrix work first.  A group is in the first class that one of its ops has.
"""
UNITS = tuple(
    f"{engine} {family}"
    for engine in ENGINES
    for family in dict.fromkeys(compute_family(name) for name in PRECISIONS)
)
"""Every engine in every precision that a chip may have a rate for, as in "vector fp32"."""
