"""A stand-in for Triton where it is not installed: kernels are defined, and none runs.

Builds of PyTorch for CUDA bring Triton with them, so code for a GPU imports it without asking.
Such an import has a stand-in here.  Code that asks first (an import inside `try`, `find_spec`,
`has_triton` of torch) hears that Triton is not there, and takes its other path: that one runs on
the emulated device.  No module of the stand-in is in `sys.modules`, so nobody comes upon it.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from rooftrace.tracer.emulation.guarded import import_is_guarded
from rooftrace.tracer.emulation.refused import DeviceError, kernel_refused
from rooftrace.tracer.emulation.state import Answers, Assume
from rooftrace.tracer.patches import original_of

NAME = "triton"
VERSION = "3.4.0"
"""What the stand-in says that it is: code that asks compares it with the least that it needs."""
_KINDS = ("JITFunction", "KernelInterface", "Autotuner", "Heuristics")
"""Classes of Triton whose objects are kernels."""


class DefinedKernel:
    """A kernel that is defined: it has its function and settings, and is refused when launched.

    fn: the function, or the kernel that is tuned.  configs: the settings among which to choose.
    """

    def __init__(self, fn: Any, configs: Any = ()) -> None:
        self.fn, self.configs = fn, list(configs or ())
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            if hasattr(fn, name):
                setattr(self, name, getattr(fn, name))

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch it, which no emulated device can."""
        raise kernel_refused(f"the Triton kernel {getattr(self, '__name__', self.fn)}")

    __call__ = warmup = run


class Config:
    """One choice of settings for a kernel, as `triton.Config` keeps it."""

    def __init__(self, kwargs: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self.kwargs = dict(kwargs or {})
        known = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "pre_hook": None}
        for name, value in {**known, **settings}.items():
            setattr(self, name, value)

    def all_kwargs(self) -> dict[str, Any]:
        """Every setting by its name."""
        rest = {name: value for name, value in vars(self).items() if name != "kwargs"}
        return {**self.kwargs, **{name: value for name, value in rest.items() if value is not None}}


class Constant:
    """A value that is known when a kernel is compiled: `tl.constexpr`."""

    value: Any

    def __init__(self, value: Any) -> None:
        self.value = value.value if isinstance(value, Constant) else value

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, Constant) else other))

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"


class Word:
    """A name of Triton that a kernel's text may use: it can be written, and has no value.

    It stands in annotations, in tables and as a decorator; whoever asks for its value is told that
    there is none.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._words: dict[str, Word] = {}

    def __getattr__(self, name: str) -> Word:
        if name.startswith("__"):
            raise AttributeError(f"{self._path} has no attribute {name!r}")
        return self._words.setdefault(name, Word(f"{self._path}.{name}"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Word):
            return args[0]  # a decorator
        return Word(f"{self._path}(...)")

    def __getitem__(self, key: Any) -> Word:
        return Word(f"{self._path}[...]")

    def __or__(self, other: Any) -> Word:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def _no_value(self, *args: Any) -> Any:
        reason = "Triton is not installed, and its stand-in has names without values"
        raise DeviceError.of(self._path, reason)

    __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = _no_value
    __enter__ = __exit__ = _no_value
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __sub__ = __mul__ = __truediv__ = _no_value

    def __repr__(self) -> str:
        return f"<{self._path}: a stand-in>"


class _Module(ModuleType):
    """A module of the stand-in: every name is there, as a word where we know no better."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _values().get(name)
        if value is None:
            value = _an_error(name) if name.endswith(_ERRORS) else Word(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def part(self, name: str) -> _Module:
        """The module of this one with that name."""
        inner = vars(self).get(name)
        if not isinstance(inner, _Module):
            inner = _Module(f"{self.__name__}.{name}")
            setattr(self, name, inner)
        return inner


_ERRORS = ("Error", "Exception", "OutOfResources")


def _an_error(name: str) -> type[Exception]:
    return type(name, (Exception,), {"__module__": __name__})


def _jit(fn: Any = None, **settings: Any) -> Any:
    return DefinedKernel if fn is None else DefinedKernel(fn)


def _autotune(configs: Any = (), *args: Any, **settings: Any) -> Any:
    return lambda fn: DefinedKernel(fn, configs)


def _heuristics(values: Any = None, **settings: Any) -> Any:
    return DefinedKernel


def _cdiv(x: int, y: int) -> int:
    return (x + y - 1) // y


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _values() -> dict[str, Any]:
    """Names that are more than words, in whichever module of Triton they are looked for."""
    return {
        "jit": _jit,
        "autotune": _autotune,
        "heuristics": _heuristics,
        "cdiv": _cdiv,
        "next_power_of_2": _next_power_of_2,
        "Config": Config,
        "constexpr": Constant,
        **dict.fromkeys(_KINDS, DefinedKernel),
    }


def _package() -> _Module:
    top = _Module(NAME)
    vars(top).update(__version__=VERSION, __path__=[])
    for name in ("language", "runtime", "compiler", "testing", "tools", "backends"):
        top.part(name)
    return top


# -- imports ---------------------------------------------------------------------------------------


def _importer(
    top: _Module, told: Callable[[], None], original: Callable[..., Any]
) -> Callable[..., Any]:
    """`__import__` with a package of that name."""

    def imported(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        first, _, rest = name.partition(".")
        if level or first != NAME or NAME in sys.modules or import_is_guarded(sys._getframe(1)):
            return original(name, globals, locals, fromlist, level)
        told()
        module = top
        for part in rest.split(".") if rest else ():
            module = module.part(part)
        return module if fromlist else top

    return imported


def answers(assume: Assume) -> Iterator[Answers]:
    """Imports of Triton: code that cannot do without it gets a stand-in.

    assume: is told when that happens: kind and text.  Where Triton is installed nothing changes.
    """
    try:
        installed = NAME in sys.modules or importlib.util.find_spec(NAME) is not None
    except (ImportError, ValueError):
        installed = False
    if installed:
        return
    text = (
        f"Triton is not installed: modules that need it see a stand-in (version {VERSION}), in "
        "which kernels can be defined and not launched"
    )
    original = original_of(builtins, "__import__")
    yield builtins, {"__import__": _importer(_package(), lambda: assume(NAME, text), original)}
