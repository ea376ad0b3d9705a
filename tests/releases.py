"""What the installed releases of torch and transformers have; tests ask here, in one place."""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:2])


def _transformers() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("transformers").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return (0, 0)


TRANSFORMERS = _transformers()
EXPERTS_HAVE_IMPLEMENTATIONS = (
    TRANSFORMERS >= (5, 0) and find_spec("transformers.integrations.moe") is not None
)
"""Before, a mixture of experts runs in one way: a loop over a list of modules."""
CPU_ATTENTION_TAKES_GROUPS = TORCH >= (2, 11)
"""Attention on a CPU with fewer key heads is one kernel; before, products and a softmax."""

LIFETIMES_ARE_EXACT = sys.version_info >= (3, 11)
"""Before, the look at a frame by which repeated calls are known keeps its variables for longer."""

with_transformers_5 = pytest.mark.skipif(TRANSFORMERS < (5, 0), reason="of transformers 5")
with_grouped_products = pytest.mark.skipif(
    not any(
        torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key)
        for key in ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    ),
    reason="this torch has no product of groups on a CPU",
)
with_implementations = pytest.mark.skipif(
    not EXPERTS_HAVE_IMPLEMENTATIONS, reason="experts_implementation is of transformers 5"
)


def needs_torch(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Skips a test of what older releases of torch have not."""
    reason = f"{what} is of torch {major}.{minor}"
    return pytest.mark.skipif((major, minor) > TORCH, reason=reason)
