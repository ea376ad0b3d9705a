"""Scopes of threads: changes of torch's modes, random state and functions that only they see."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ClassVar

import torch

from rooftrace.errors import RequestError
from rooftrace.tracer import spec_after, torch_private
from rooftrace.tracer.recording.releases import Release, installed_release

# -- contexts --------------------------------------------------------------------------------------
# Contexts of one thread.
#
# Torch's way of entering a mode notes the modes before in variables that all threads share, and
# restores them in the order in which modes end.  These helpers touch the stacks of the thread only.


def fake_mode() -> Any:
    """The FakeTensorMode that is on in this thread; None where there is none."""
    return torch_private.get_dispatch_mode(torch_private.TorchDispatchModeKey.FAKE)


def push(mode: Any) -> None:
    """Put a dispatch mode on."""
    torch_private.push_dispatch_mode(mode)


def pop(mode: Any) -> None:
    """Take the innermost dispatch mode off, which is `mode`.

    The caller holds the mode until it is off: torch 2.8 reads it after it dropped its reference.
    """
    torch_private.pop_dispatch_mode()


def device_modes() -> tuple[Any, ...]:
    """The function modes of this thread by which torch chooses a device."""
    stack = torch_private.get_current_function_mode_stack()
    return tuple(mode for mode in stack if isinstance(mode, torch_private.DeviceContext))


@contextlib.contextmanager
def functions_on(modes: Sequence[Any]) -> Iterator[None]:
    """Inside, these function modes are on in this thread too, the last one innermost."""
    _put_on(modes)
    try:
        yield
    finally:
        for _ in modes:
            torch_private.pop_function_mode()


@contextlib.contextmanager
def without_functions() -> Iterator[None]:
    """Inside, no function mode of this thread is on, and code may put on others."""
    around = _taken_off()
    try:
        yield
    finally:
        _put_on(around)


def untraced() -> AbstractContextManager[None]:
    """Inside, sizes of tensors are numbers, also where torch.jit.trace would have them recorded."""
    graph = torch_private.get_tracing_state()
    return _ALREADY if graph is None else _untraced(graph)


_ALREADY = contextlib.nullcontext()
"""For the many ops outside of torch.jit.trace."""


@contextlib.contextmanager
def _untraced(graph: Any) -> Iterator[None]:
    refused = torch_private.excluded_keys().remove(torch_private.parse_dispatch_key("Tracer"))
    with torch_private.ForceDispatchKeyGuard(torch_private.included_keys(), refused):
        torch_private.set_tracing_state(None)
        try:
            yield
        finally:
            torch_private.set_tracing_state(graph)


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Inside, torch.jit.trace notes ops, also below a mode."""
    tracer = torch_private.parse_dispatch_key("Tracer")
    wanted = torch_private.included_keys().add(tracer)
    refused = torch_private.excluded_keys().remove(tracer)
    with torch_private.ForceDispatchKeyGuard(wanted, refused):
        yield


def default_device() -> torch.device:
    """The default device of this thread; torch 2.8 raises once a default was taken back."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Inside, torch runs as it is in this thread: no mode of ours or of the user's sees it."""
    with torch_private.disable_current_modes(), without_functions():
        yield


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, no recording and no mode around this code sees what this thread runs.

    The device that a mode of torch chooses stays chosen, and may be changed inside.  Raises
    RequestError inside of a transform or a tracer of torch that cannot be left so.
    """
    around_here = _tracer_around()
    if around_here:
        raise RequestError(f"called inside of {around_here}: call rooftrace outside of it")
    with Scope().entered(), torch_private.disable_current_modes():
        around = _taken_off()
        devices = [mode for mode in around if isinstance(mode, torch_private.DeviceContext)]
        _put_on(devices)
        try:
            yield
        finally:
            left = _taken_off()
            if left != devices:  # the code has set another default device
                around = [*left, *(mode for mode in around if mode not in devices)]
            _put_on(around)


def _tracer_around() -> str:
    """Torch's tracer or transform that is active in this thread, other than a mode; "" for none."""
    if torch_private.is_tracing():
        return "torch.jit.trace"
    if torch_private.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, grad, jvp, functionalize)"
    # make_fx sets the flag too, and records by a mode.  torch's function for it warns.
    if _fx_traces() and not torch_private.is_in_torch_dispatch_mode():
        return "torch.fx.symbolic_trace"
    return ""


def _fx_traces() -> bool:
    if torch_private.has("is_fx_symbolic_tracing"):
        return torch_private.is_fx_symbolic_tracing()
    return bool(torch_private.is_fx_tracing_flag)


def _taken_off() -> list[Any]:
    """The function modes of this thread, the innermost last; none is on afterwards."""
    count = torch_private.len_torch_function_stack()
    return [torch_private.pop_function_mode() for _ in range(count)][::-1]


def _put_on(modes: Sequence[Any]) -> None:
    for mode in modes:
        torch_private.push_function_mode(mode)


# -- modules on meta are traced themselves: by one recording at a time -----------------------------

_CHANGED = threading.Condition()
_CLAIMED: dict[int, Counter[int]] = {}  # how often each owner claimed an object, by identity


@contextlib.contextmanager
def claimed(objects: Sequence[Any]) -> Iterator[None]:
    """Inside, these objects are this recording's; another thread that claims one waits.

    A trace sets training flags, gradients and the like of a module on meta.  Traces inside of the
    trace that has an object may claim it too, also in threads that it started.
    """
    scope = Scope.current()
    owner = threading.get_ident() if scope is None else scope.owner
    keys = {id(item) for item in objects}
    with _CHANGED:
        while any(_CLAIMED[key].keys() - {owner} for key in keys if key in _CLAIMED):
            _CHANGED.wait()
        for key in keys:
            _CLAIMED.setdefault(key, Counter())[owner] += 1
    try:
        yield
    finally:
        with _CHANGED:
            for key in keys:
                owners = _CLAIMED[key]
                owners[owner] -= 1
                if not owners[owner]:
                    del _CLAIMED[key]
            _CHANGED.notify_all()


# -- random numbers of the process -----------------------------------------------------------------


@contextlib.contextmanager
def draws_undone(devices: bool = False) -> Iterator[None]:
    """At the end the generators of Python, torch and numpy are as if nothing had been drawn.

    devices: also the generators of the GPUs that this process uses.
    """
    numpy: Any = sys.modules.get("numpy.random")
    states = random.getstate(), torch.get_rng_state(), numpy and numpy.get_state()
    cuda: Any = torch.cuda
    on_gpus = cuda.get_rng_state_all() if devices and cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.set_state(states[2])
        if on_gpus is not None:
            cuda.set_rng_state_all(on_gpus)


# -- replacing -------------------------------------------------------------------------------------
# Functions and attributes of other people's modules and classes, replaced for some threads.
#
# The first scope that replaces a name puts a guard there; the last one puts the original back.
# The guard runs the replacement of the scope that its thread belongs to, and the original in any
# other thread.  So scopes of several threads may overlap and end in any order, and code that
# keeps a reference to the guard keeps the original.
#
# A process that runs nothing but a script has no other threads: `put` replaces for all, for good.

_ABSENT: Any = object()
"""Stands for an attribute that is not there."""
_LOCK = threading.RLock()
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


class _Guard:
    """A name that is replaced: `instead` stands for it in threads whose scope does not say."""

    __slots__ = ("count", "home", "instead", "name", "original", "there")

    def __init__(self, home: Any, name: str) -> None:
        self.home, self.name = home, name
        self.original = self.instead = vars(home).get(name, _ABSENT)
        self.count = 0  # how many scopes replace it
        if isinstance(self.original, _FUNCTIONS) or isinstance(home, ModuleType):
            self.there: Any = _guarded_function(self)
        else:
            self.there = _GuardedAttribute(self)

    def chosen(self) -> Any:
        """The value of the name in the running thread."""
        scope = Scope.current()
        if scope is None or not self.count:  # somebody may keep a reference to the former guard
            return self.instead
        return scope.replacements.get((id(self.home), self.name), self.instead)

    def is_there(self) -> bool:
        return vars(self.home).get(self.name, _ABSENT) is self.there

    def install(self) -> None:
        setattr(self.home, self.name, self.there)

    def remove(self) -> None:
        if not self.is_there():
            return  # somebody else replaced it since, and may call the guard
        if self.original is _ABSENT:
            delattr(self.home, self.name)
        else:
            setattr(self.home, self.name, self.original)

    def renew(self) -> None:
        """Install it again, where the original may be another one since it was removed."""
        now = vars(self.home).get(self.name, _ABSENT)
        if self.instead is self.original:
            self.instead = now
        self.original = now
        self.install()


_GUARDS: dict[tuple[int, str], _Guard] = {}


@contextlib.contextmanager
def replaced(home: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Inside, these attributes of a module or a class are others for the threads of this scope."""
    scope = Scope.current()
    assert scope is not None, "a replacement belongs to a scope"
    _dynamo_first()
    keys = {(id(home), name): value for name, value in replacements.items()}
    with _LOCK:
        for name in replacements:
            _guard_of(home, name).count += 1
    try:
        with scope.replacing(keys):
            yield
    finally:
        with _LOCK:
            for key in keys:
                guard = _GUARDS[key]
                guard.count -= 1
                if not guard.count:
                    del _GUARDS[key]
                    guard.remove()


def put(home: Any, replacements: Mapping[str, Any]) -> None:
    """Replace these attributes of a module or a class in this process, for good."""
    _dynamo_first()
    with _LOCK:
        for name, value in replacements.items():
            guard = _guard_of(home, name)
            guard.count += 1
            guard.instead = value
            if isinstance(home, ModuleType) and not isinstance(guard.original, _FUNCTIONS):
                guard.there = value  # no function: it may be read without a call
                guard.install()


Replacing = Callable[[ModuleType], Iterable[tuple[Any, Mapping[str, Any]]]]


class _Importing:
    """A finder of modules of which something is replaced when they have run.

    then: returns, of each of them by name, objects and their replacements.
    """

    then: ClassVar[dict[str, Replacing]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.then:
            return None
        spec: Any = spec_after(self, name, path, target)
        run = None if spec is None else getattr(spec.loader, "exec_module", None)
        if run is not None:

            def exec_module(module: ModuleType) -> None:
                run(module)
                for home, names in self.then[name](module):
                    put(home, names)

            spec.loader.exec_module = exec_module
        return spec


_IMPORTING: Any = _Importing()


def when_imported(name: str, then: Replacing) -> None:
    """Replace what `then` says of a module: now if it is imported, else when it is."""
    _Importing.then[name] = then
    if _IMPORTING not in sys.meta_path:
        sys.meta_path.insert(0, _IMPORTING)
    if name in sys.modules:
        for home, names in then(sys.modules[name]):
            put(home, names)


def _guard_of(home: Any, name: str) -> _Guard:
    """The guard of a name, which is there."""
    key = id(home), name
    guard = _GUARDS.get(key)
    if guard is None:
        guard = _GUARDS[key] = _Guard(home, name)
        guard.install()
    return guard


def _dynamo_first() -> None:
    """Import Dynamo before anything is replaced, unless it is found later without replacements.

    It knows functions of torch by the objects under their names when it was imported.
    """
    later = torch_private.DYNAMO_LATER
    if not later.waits and not later.is_loaded:
        with plainly():
            later.load()


@contextlib.contextmanager
def _originals() -> Iterator[None]:
    """Inside, nothing is replaced, and no mode is on in this thread."""
    with _LOCK, plainly():
        guards = [guard for guard in _GUARDS.values() if guard.is_there()]
        for guard in guards:
            guard.remove()
        try:
            yield
        finally:
            for guard in guards:
                guard.renew()


torch_private.DYNAMO_LATER.around.append(_originals)


def original_of(home: Any, name: str) -> Any:
    """The attribute of a module or class (as its body has it) without a replacement of ours."""
    with _LOCK:
        guard = _GUARDS.get((id(home), name))
        return vars(home).get(name, _ABSENT) if guard is None else guard.original


def _guarded_function(guard: _Guard) -> Any:
    chosen = guard.chosen

    @functools.wraps(guard.original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return chosen()(*args, **kwargs)

    return call


class _GuardedAttribute:
    """Stands for an attribute that is no function: a property, a constant, a class."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard

    def __get__(self, instance: Any, owner: Any) -> Any:
        value = self._guard.chosen()
        if value is _ABSENT:
            value = self._inherited(owner)
        bind = getattr(type(value), "__get__", None)
        return value if bind is None else bind(value, instance, owner)

    def _inherited(self, owner: type) -> Any:
        kinds, name = owner.__mro__, self._guard.name
        for kind in kinds[kinds.index(self._guard.home) + 1 :]:
            if name in vars(kind):
                return vars(kind)[name]
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {name!r}")


# -- stand-ins -------------------------------------------------------------------------------------
# Classes of torch that hold something of the device: streams, events, graphs, without a device.
#
# User code may import these classes and keep them.  So each stays the same object, with other
# methods meanwhile.

_OF_EVERY_CLASS = frozenset(
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
"""Attributes that every class has."""


def nothing(*args: Any, **kwargs: Any) -> None:
    """A method that does nothing."""


def methods(face: type) -> dict[str, Any]:
    """The attributes that a class defines, to put into another class."""
    return {name: item for name, item in vars(face).items() if name not in _OF_EVERY_CLASS}


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


# -- Scopes: the recording that a thread belongs to, and its replacements of functions of torch ----


class Scope:
    """One recording: its replacements of functions, in the threads that it records.

    replacements: by the identity of the module or class that holds the original, and its name.
    owner: the thread in which it began, or in which the recording around it did.
    kept: objects that parts of the recording keep for these threads, by name.
    release: of PyTorch, whose kernels of CUDA run.
    apart: while an attention runs as several kernels, why it does; else "".
    """

    __slots__ = ("apart", "kept", "owner", "release", "replacements")

    def __init__(self, release: Release | None = None) -> None:
        outer = _thread.current
        self.release = release or installed_release()
        self.apart = ""
        self.replacements: dict[tuple[int, str], Any] = {}
        self.owner: int = threading.get_ident() if outer is None else outer.owner
        self.kept: dict[str, Any] = {}

    @staticmethod
    def current() -> Scope | None:
        """The scope to which the running thread belongs; None for one that nobody records."""
        return _thread.current

    @contextlib.contextmanager
    def replacing(self, values: Mapping[tuple[int, str], Any]) -> Iterator[None]:
        """Inside, these values stand for their names in the threads of this scope."""
        before = {key: self.replacements[key] for key in values if key in self.replacements}
        self.replacements.update(values)
        try:
            yield
        finally:
            for key in values:
                self.replacements.pop(key, None)
            self.replacements.update(before)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this thread belongs to this scope, and to no other."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Let this thread belong to this scope."""
        _thread.scopes = (*_thread.scopes, self)
        _thread.current = self

    def leave(self) -> None:
        """This thread belongs to the scope that was around this one, as it last entered it."""
        scopes = list(_thread.scopes)
        place = next((i for i in reversed(range(len(scopes))) if scopes[i] is self), None)
        if place is not None:
            del scopes[place]
        _thread.scopes = tuple(scopes)
        _thread.current = _thread.scopes[-1] if _thread.scopes else None


class _ThreadScopes(threading.local):
    scopes: tuple[Scope, ...] = ()  # the entered ones, the innermost last
    current: Scope | None = None  # the innermost


_thread = _ThreadScopes()
