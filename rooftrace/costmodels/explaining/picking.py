"""Which kernels of a plan a pattern means: by path of a module, name of an op, or place."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from rooftrace.costmodels.planforms.kernelforms import KernelForm
from rooftrace.costmodels.planforms.planform import PlanForm
from rooftrace.errors import RequestError, near

MOST_NAMES = 8
Alike = tuple[int, ...]
"""Places in a plan of kernels that are the same op of the same module with the same numbers."""


def picked(plan: PlanForm, pattern: str | int) -> tuple[Alike, ...]:
    """The kernels that a pattern means, those that are alike together.

    pattern: a module's path, whole or its end, with * as in file names (indices of layers are *,
    too); the name of an op or of a fused kernel; or the place of a kernel in the plan.
    Raises RequestError where there is no such kernel: it names the nearest.
    """
    places = _places(plan, str(pattern).strip())
    alike: dict[object, list[int]] = {}
    for place in places:
        kernel = plan.kernels[place]
        key = (kernel.numbers.module, kernel.numbers.name, kernel.key)
        alike.setdefault(key, []).append(place)
    return tuple(tuple(many) for many in alike.values())


def _places(plan: PlanForm, pattern: str) -> Sequence[int]:
    kernels = plan.kernels
    if pattern.lstrip("-").isdigit():
        if 0 <= int(pattern) < len(kernels):
            return (int(pattern),)
        raise RequestError(f"--op {pattern}: kernels have numbers from 0 to {len(kernels) - 1}")
    chosen = [place for place, kernel in enumerate(kernels) if _meant(kernel, pattern)]
    if chosen:
        return chosen
    names = _names(kernels)
    ends = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
    last = pattern.rsplit(".", 1)[-1].strip("*") or pattern
    close = near(pattern, names) or ends.get(near(last, ends), "")
    said = f"; did you mean {close!r}?" if close else ""
    shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    raise RequestError(
        f"--op {pattern!r}: no kernel of this step is called so or runs in such a module{said}; "
        f"there are {shown}"
    )


def _meant(kernel: KernelForm, pattern: str) -> bool:
    module, name = kernel.numbers.module, kernel.numbers.name
    plain = name.removeprefix("aten.")
    tails = (module, *(module.split(".", part)[-1] for part in range(1, module.count(".") + 1)))
    starred = ".".join("*" if part.isdigit() else part for part in pattern.split("."))
    return any(fnmatchcase(text, starred) for text in (*tails, name, plain)) or starred in tails


def _names(kernels: Sequence[KernelForm]) -> list[str]:
    """Paths of modules, then names of kernels, each once."""
    modules = [k.numbers.module for k in kernels if k.numbers.module]
    return list(dict.fromkeys([*modules, *(k.numbers.name for k in kernels)]))
