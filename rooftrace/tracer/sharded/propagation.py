"""How torch finds the sizes of results of sharded tensors: it runs the op on whole ones, as fakes.

No process does that work, so no recording sees it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rooftrace.tracer.patches import original_of, replaced

_HOME = "torch.distributed.tensor._sharding_prop"
_NAME = "_propagate_tensor_meta_non_cached"
_SCHEMA = "torch.distributed.tensor._op_schema"
_FAKE = "_rebuild_tensor_from_dtensor_meta"


@contextlib.contextmanager
def sizes_unseen() -> Iterator[None]:
    """Inside, sizes of whole tensors are found outside of any mode of the code and of ours."""
    home = sys.modules.get(_HOME)
    propagator: Any = getattr(home, "ShardingPropagator", None)
    if propagator is None or not hasattr(propagator, _NAME):
        yield
        return
    original = original_of(propagator, _NAME)

    def sizes(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced(propagator, {_NAME: sizes}))
        schema = sys.modules[_SCHEMA]
        if hasattr(schema, _FAKE):
            undo.enter_context(replaced(schema, {_FAKE: _on_meta}))
        yield


def _on_meta(spec: Any) -> torch.Tensor:
    """A tensor of the size of a sharded one; its mesh may be of a device that torch lacks here."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
