"""Which ops are registered with torch in this process.  Loads no torch and no library itself."""

from __future__ import annotations

import sys


def registered_ops(library: str) -> frozenset[str]:
    """The names of a library's ops ("mine.lora", "mine.lora.out"), with and without overloads.

    Empty where torch is not loaded, or nothing of the library is.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return frozenset()
    names = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        if namespace == library:
            plain, _, overload = op.partition(".")
            names |= {f"{library}.{plain}", f"{library}.{plain}.{overload or 'default'}"}
    return frozenset(names)
