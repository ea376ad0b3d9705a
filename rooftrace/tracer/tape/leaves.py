"""The real tensors behind values that no op made: weights, inputs, and numbers that are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes


class Leaves:
    """Real tensors by their nodes, and what was computed from them (see recording/realdata)."""

    def __init__(self) -> None:
        self.tensors: dict[fx.Node, tuple[Tensor, int]] = {}  # and the version that counts
        self.computed: dict[fx.Node, Any] = {}

    def enter(self, node: fx.Node, tensor: Tensor) -> None:
        """Say which real tensor a node stands for."""
        version = 0 if tensor.is_inference() else tensor._version
        self.tensors[node] = tensor, version

    def replace(self, node: fx.Node, tensor: Tensor) -> None:
        """A weight was put where another stood, as the same value of the graph.

        Where they differ and the first was read, no value follows from either any more.
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
        """Give the tensors back."""
        self.tensors.clear()
        self.computed.clear()
