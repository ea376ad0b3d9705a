"""Ops of ours that stand in a graph for what the host tells the device beside its work.

A stream is a queue of the device.  `record_event` makes an event, a value without bytes, when
everything before it on its stream is done; `wait_event` holds back its own stream until then.
`resize_storage` frees the bytes of a tensor that stays alive, or allocates them again.
"""

from __future__ import annotations

RECORD_EVENT = "rooftrace.record_event"
WAIT_EVENT = "rooftrace.wait_event"
RESIZE_STORAGE = "rooftrace.resize_storage"
STREAM_MARKS = frozenset({RECORD_EVENT, WAIT_EVENT})
"""Marks of the order of work: no kernel begins before one and ends after it."""
MARKS = frozenset({RECORD_EVENT, WAIT_EVENT, RESIZE_STORAGE})
"""Ops without work of their own, which no pass may leave out."""
