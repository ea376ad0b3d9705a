"""The words that the records of a graph use, each for one thing."""

ROLES = ("weights", "activations", "kv", "gradients", "optimizer", "temporary", "constants")
"""Whose bytes a tensor is.

weights: parameters and persistent buffers.  activations: inputs and what forward makes of them.
kv: state that one call hands to the next (key/value cache, recurrent state).  gradients: gradients
of parameters.  optimizer: optimizer states and master weights.  temporary: gradients of
activations, materialised attention scores and other values that no later step needs.  constants:
values that depend on neither weights nor floating inputs (positions, masks, tables).
"""

PARTS = ("forward", "backward", "recompute", "optimizer")
REVERSED = frozenset({"backward", "recompute"})
"""Parts of a step that go through the iterations in reverse order."""

KINDS = ("kernel", "view", "sync")
"""kernel: the device works.  view: metadata or an allocation, host only.  sync: the host waits."""

UNRECORDED = "unrecorded"
"""Kind of the assumptions that say that something ran out of sight of the trace."""
LOWER_BOUND = frozenset({UNRECORDED, "higher-order"})
"""Kinds of assumptions with which the totals of a graph are a lower bound."""
