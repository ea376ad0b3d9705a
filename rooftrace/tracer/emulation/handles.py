"""Classes of torch that hold something of the device: streams, events, graphs, without a device.

User code may import these classes and keep them.  So each stays the same object, with other methods
meanwhile.
"""

from __future__ import annotations

import functools
from typing import Any

_OWN = frozenset(
    {
        "__annotations__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
    }
)
"""What every class has of itself."""


def nothing(*args: Any, **kwargs: Any) -> None:
    """A method that does nothing."""


def methods(face: type) -> dict[str, Any]:
    """What a class defines, as it can stand in another class."""
    return {name: item for name, item in vars(face).items() if name not in _OWN}


def made(kind: Any, face: type) -> Any:
    """An instance of one of torch's classes without a device.

    In builds for a GPU these classes are written in C: then it is one of `face`, which says that
    it is an instance of torch's class.
    """
    try:
        return object.__new__(kind)
    except TypeError:
        return object.__new__(_stand_in(face, kind))


@functools.cache
def _stand_in(face: type, kind: type) -> type:
    return type(kind.__name__, (face,), {"__class__": property(lambda self: kind)})
