"""Names of the classes of kernels that reach alike shares of a chip's peaks."""

from rooftrace.costmodels.registry import KINDS

LAST = ", channels last"
"""What the name of a class ends in whose images are given with channels last: eager kernels differ
there.  A knob file without a share for it means that of the class without it."""
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
"""Every class, those of matrix work first; a group of the first that any of its ops is in."""
