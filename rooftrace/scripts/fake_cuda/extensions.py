"""Imports of GPU code under emulation: guards, a stand-in for Triton, and compiled extensions."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from rooftrace.scripts.fake_cuda.state import (
    Answers,
    Assume,
    DeviceError,
    MissingExtensionError,
    MissingLibraryError,
    kernel_refused,
    refusal,
)
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import original_of, when_imported

# -- guarded imports -------------------------------------------------------------------------------
# Whether code that imports a module goes on without it: the import stands in a `try`.

_HERE = str(Path(__file__).resolve().parents[2]) + os.sep
_NAMED = frozenset({"ImportError", "ModuleNotFoundError"})
_BROAD = frozenset({"Exception", "BaseException"})
_LOADERS = ("exec_module", "load_module", "create_module")
"""Methods of import hooks, which stand between a module and who imports it."""
_PLAIN = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass)
"""Statements of a `try` that tries imports and nothing else."""


def import_is_guarded(frame: FrameType | None) -> bool:
    """Whether an import may fail: its code, or code whose import led to it, catches that.

    frame: the innermost frame, of the import statement or below it.  Handlers that name
    ImportError count, and broad ones around imports alone; those that raise do not.
    """
    return any(_caught(place) for place in _importing(frame))


def _importing(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames that import: of modules, one imported by the next, up to a function."""
    while frame is not None:
        code = frame.f_code
        if not _plumbing(code.co_filename) and code.co_name not in _LOADERS:
            yield frame
            if code.co_flags & inspect.CO_OPTIMIZED:  # a function, no body of a module or a class
                return
        frame = frame.f_back


def _plumbing(filename: str) -> bool:
    return filename.startswith(("<frozen importlib", _HERE)) or filename == _IMPORTLIB


_IMPORTLIB = str(inspect.getsourcefile(__import__("importlib")))


def _caught(frame: FrameType) -> bool:
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return False  # no source to read
    return any(_tries(node) for node in ast.walk(tree) if _inside(node, frame.f_lineno) is not None)


def _inside(node: ast.AST, line: int) -> ast.stmt | None:
    """The statement at a line in the body of a `try` or a `with`."""
    if not isinstance(node, ast.Try | ast.With):
        return None
    for step in node.body:
        if step.lineno <= line <= (step.end_lineno or step.lineno):
            return step
    return None


def _tries(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        calls = [
            item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)
        ]
        return any(
            _last(call.func) == "suppress"
            and any(_last(kind) in _NAMED | _BROAD for kind in call.args)
            for call in calls
        )
    if not isinstance(node, ast.Try):
        return False
    tried_alone = all(isinstance(step, _PLAIN) for step in node.body)
    return any(_goes_on(handler, tried_alone) for handler in node.handlers)


def _goes_on(handler: ast.ExceptHandler, broad_counts: bool) -> bool:
    """Whether a handler catches that a module is missing, and does not raise."""
    if isinstance(handler.body[-1], ast.Raise):
        return False
    kind = handler.type
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [] if kind is None else [kind]
    names = {_last(item) for item in kinds}
    return bool(names & _NAMED) or (broad_counts and (kind is None or bool(names & _BROAD)))


def _last(node: ast.expr) -> str:
    """The last name of a dotted one."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# -- triton ----------------------------------------------------------------------------------------
# A stand-in for Triton where it is not installed: kernels are defined, and none runs.
#
# Builds of PyTorch for CUDA bring Triton with them, so code for a GPU imports it without asking.
# Such an import has a stand-in here.  Code that asks first (an import inside `try`, `find_spec`,
# `has_triton` of torch) hears that Triton is not there, and takes its other path: that one runs on
# the emulated device.  No module of the stand-in is in `sys.modules`, so nobody comes upon it.

NAME = "triton"
VERSION = "3.4.0"
"""The version of the stand-in: code compares it with the least version that it needs."""
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
        defaults = {
            "num_warps": 4,
            "num_stages": 3,
            "num_ctas": 1,
            "maxnreg": None,
            "pre_hook": None,
        }
        for name, value in {**defaults, **settings}.items():
            setattr(self, name, value)

    def all_kwargs(self) -> dict[str, Any]:
        """Every setting by its name."""
        rest = {name: value for name, value in vars(self).items() if name != "kwargs"}
        return {**self.kwargs, **{name: value for name, value in rest.items() if value is not None}}


class Constant:
    """A compile-time constant of a kernel: `tl.constexpr`."""

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

    It stands in annotations, in tables and as a decorator; reading its value says that
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


class _StandInModule(ModuleType):
    """A module of the stand-in: every name is there, as a word where we know no better."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = _values().get(name)
        if value is None:
            value = _an_error(name) if name.endswith(_ERRORS) else Word(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def part(self, name: str) -> _StandInModule:
        """The module of this one with that name."""
        inner = vars(self).get(name)
        if not isinstance(inner, _StandInModule):
            inner = _StandInModule(f"{self.__name__}.{name}")
            setattr(self, name, inner)
        return inner


_ERRORS = ("Error", "Exception", "OutOfResources")


def _an_error(name: str) -> type[Exception]:
    return type(name, (Exception,), {"__module__": __name__})


def _jit(fn: Any = None, **settings: Any) -> Any:
    return DefinedKernel if fn is None else DefinedKernel(fn)


def _values() -> dict[str, Any]:
    """Names that are more than words, in whichever module of Triton they are looked for."""
    return {
        "jit": _jit,
        "autotune": lambda configs=(), *args, **how: lambda fn: DefinedKernel(fn, configs),
        "heuristics": lambda values=None, **how: DefinedKernel,
        "cdiv": lambda x, y: (x + y - 1) // y,
        "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
        "Config": Config,
        "constexpr": Constant,
        **dict.fromkeys(_KINDS, DefinedKernel),
    }


def _package() -> _StandInModule:
    top = _StandInModule(NAME)
    vars(top).update(__version__=VERSION, __path__=[])
    for name in ("language", "runtime", "compiler", "testing", "tools", "backends"):
        top.part(name)
    return top


# -- imports ---------------------------------------------------------------------------------------


def _importer(
    top: _StandInModule, report: Callable[[], None], original: Callable[..., Any]
) -> Callable[..., Any]:
    """`__import__` with a package of that name."""

    def imported(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        first, _, rest = name.partition(".")
        if level or first != NAME or NAME in sys.modules or import_is_guarded(sys._getframe(1)):
            return original(name, globals, locals, fromlist, level)
        report()
        module = top
        for part in rest.split(".") if rest else ():
            module = module.part(part)
        return module if fromlist else top

    return imported


def triton_answers(assume: Assume) -> Iterator[Answers]:
    """Imports of Triton: code that cannot do without it gets a stand-in.

    assume: takes kind and text when that happens.  Where Triton is installed nothing changes.
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


# -- extensions ------------------------------------------------------------------------------------
# Code compiled for a GPU: extensions, libraries, Triton's kernels.  Each fails by its name.

_LIBRARIES = ("libcuda", "libcudart", "libc10_cuda", "libtorch_cuda", "libnv", "libcu", "libamdhip")
"""Shared libraries that only an installation for a GPU has."""
_TRITON = "triton.runtime.jit"
_CPP = "torch.utils.cpp_extension"


def _is_about_cuda(error: Exception) -> bool:
    text = f"{error} {error.__cause__ or ''}"
    return any(name in text for name in _LIBRARIES) or (
        "undefined symbol" in text and "cuda" in text
    )


def _library_loader() -> Callable[..., Any]:
    kind: Any = type(torch.ops)
    original = original_of(kind, "load_library")

    def load_library(self: Any, path: Any) -> Any:
        try:
            return original(self, path)
        except OSError as error:
            if not _is_about_cuda(error):
                raise
            call = f"torch.ops.load_library({str(path)!r})"
            raise kernel_refused(call, MissingLibraryError) from error

    return load_library


def _module_loader() -> Callable[..., Any]:
    original = original_of(ExtensionFileLoader, "create_module")

    def create_module(self: Any, spec: Any) -> Any:
        try:
            return original(self, spec)
        except ImportError as error:
            if not _is_about_cuda(error):
                raise
            raise kernel_refused(f"import {spec.name}", MissingExtensionError) from error

    return create_module


def _compilers(module: Any) -> dict[str, Any]:
    """Functions of torch.utils.cpp_extension that compile for a GPU."""
    load, load_inline = original_of(module, "load"), original_of(module, "load_inline")

    def compiled(name: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [sources] if isinstance(sources, str) else list(sources)
        if kwargs.get("with_cuda") or any(str(path).endswith((".cu", ".hip")) for path in listed):
            raise kernel_refused(f"torch.utils.cpp_extension.load({name!r})")
        return load(name, sources, *args, **kwargs)

    def compiled_inline(name: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or kwargs.get("cuda_sources"):
            raise kernel_refused(f"torch.utils.cpp_extension.load_inline({name!r})")
        return load_inline(name, *args, **kwargs)

    def described(name: Any, *args: Any, **kwargs: Any) -> Any:
        raise kernel_refused(f"CUDAExtension({name!r})")

    return {"load": compiled, "load_inline": compiled_inline, "CUDAExtension": described}


def _launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    name = getattr(kernel, "__name__", None) or getattr(kernel, "fn", kernel)
    raise kernel_refused(f"the Triton kernel {name}")


def _of_module(module: ModuleType) -> tuple[Any, dict[str, Any]]:
    """The object to patch once a module is loaded, and its replacements."""
    if module.__name__ == _TRITON:
        return module.JITFunction, {"run": _launch}
    return module, _compilers(module)


def watch_imports() -> None:
    """Modules that compile or launch code for a GPU refuse it from when they are imported on."""
    for name in (_TRITON, _CPP):
        when_imported(name, lambda module: [_of_module(module)])


def answers() -> Iterator[Answers]:
    """Loaders and compilers of code for a GPU fail with an error that says how to go on."""
    yield type(torch.ops), {"load_library": _library_loader()}
    yield ExtensionFileLoader, {"create_module": _module_loader()}
    yield torch_private.bindings, _refused_names()
    yield from _refused_classes()


def _refused_names() -> dict[str, Any]:
    """Functions of torch._C for CUDA that no emulated device answers, each with its error."""
    pools = "memory pools are the allocator's, which is not run"
    raw = "there is no memory of the device to point to"
    handle = "there is no library of the device to hold"
    tuning = "there is nothing to tune"
    table = {
        "_cuda_cudaCachingAllocator_raw_alloc": ("torch.cuda.caching_allocator_alloc", raw),
        "_cuda_cudaCachingAllocator_raw_delete": ("torch.cuda.caching_allocator_delete", raw),
        "_cuda_customAllocator": ("torch.cuda.memory.CUDAPluggableAllocator", pools),
        "_cuda_getAllocator": ("torch.cuda.memory._get_current_allocator", pools),
        "_cuda_cudaHostAllocator": ("torch.cuda.memory._host_allocator", pools),
        "_cuda_getCurrentBlasHandle": ("torch.cuda.current_blas_handle", handle),
        "_cuda_getCurrentSolverHandle": ("torch.cuda.current_solver_handle", handle),
        "_cuda_jiterator_compile_and_launch_kernel": (
            "torch.cuda.jiterator",
            "its kernels cannot be seen",
        ),
        **{
            f"_cuda_tunableop_{name}": ("torch.cuda.tunable", tuning)
            for name in (
                "enable",
                "tuning_enable",
                "write_file_on_exit",
                "write_file",
                "set_filename",
                "get_filename",
                "get_results",
                "get_validators",
                "read_file",
                "set_max_tuning_duration",
                "get_max_tuning_duration",
                "set_max_tuning_iterations",
                "get_max_tuning_iterations",
                "set_rotating_buffer_size",
                "get_rotating_buffer_size",
                "set_numerical_check_tolerances",
            )
        },
        "_cuda_record_untuned_enable": ("torch.cuda.tunable", tuning),
        "_cuda_sleep": ("torch.cuda._sleep", "nothing counts the cycles"),
        "_cuda_changeCurrentAllocator": ("torch.cuda.memory.change_current_allocator", pools),
        "_gds_register_buffer": ("torch.cuda.gds", raw),
        "_gds_register_handle": ("torch.cuda.gds", raw),
    }
    return {name: refusal(call, reason) for name, (call, reason) in table.items()}


def _refused_classes() -> Iterator[Answers]:
    """Classes of torch.cuda that no emulated device can make, and methods that say so."""
    cuda: Any = torch.cuda
    for name in ("MemPool", "CUDAPluggableAllocator", "GreenContext"):
        kind = getattr(cuda, name, None)
        if kind is not None:
            refuse = refusal(f"torch.cuda.{name}", "the driver and its allocator are not run")
            yield kind, {"__new__": staticmethod(refuse), "create": refuse}
    yield torch_private.FakeTensorMode, {"from_tensor": _from_tensor()}


def _from_tensor() -> Callable[..., Any]:
    original = original_of(torch_private.FakeTensorMode, "from_tensor")

    def from_tensor(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cuda":  # autograd would end the process
            raise DeviceError.of(
                "torch.export, or what else makes a FakeTensor of a tensor of the device",
                "PyTorch's CUDA half would have to answer for it",
                "Do it with the module and its inputs on the CPU, and move what comes of it",
            )
        return original(self, tensor, *args, **kwargs)

    return from_tensor
