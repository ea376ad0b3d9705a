"""Where a tensor is: to a script, tensors on meta are shown on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on meta, whatever the function modes that are on say of it."""
    with torch._C.DisableTorchFunction():
        return tensor.device.type == "meta"
