"""The real tensors behind values that no op made: weights, inputs, and numbers that are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes


class Leaves:
    """Real tensors by node, and the values computed from them (see recording/realdata)."""

    def __init__(self) -> None:
        self.tensors: dict[fx.Node, tuple[Tensor, int]] = {}  # and the version that counts
        self.computed: dict[fx.Node, Any] = {}

    def enter(self, node: fx.Node, tensor: Tensor) -> None:
        """Remember the real tensor of a node."""
        version = 0 if tensor.is_inference() else tensor._version
        self.tensors[node] = tensor, version

    def replace(self, node: fx.Node, tensor: Tensor) -> None:
        """Another weight replaces the one of a node; both are one value of the graph.

        If they differ and the first was read, no values are computed from either any more.
        """
        if node not in self.tensors or tensor.device.type != "cpu":
            self.tensors.pop(node, None)
        elif node.users:
            before = self.tensors[node][0]
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                same = before.shape == tensor.shape and torch.equal(before, tensor)
            if same:
                return
            self.tensors.pop(node)
        else:
            self.enter(node, tensor.detach())
        self.computed.pop(node, None)

    def forget(self) -> None:
        """Release the tensors."""
        self.tensors.clear()
        self.computed.clear()
