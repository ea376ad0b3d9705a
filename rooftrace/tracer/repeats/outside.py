"""State that calls of modules read: module attributes, globals, closures, and contexts."""

from __future__ import annotations

import contextvars
import functools
import gc
import itertools
import logging
import random
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace._processes import collector_off
from rooftrace.tracer.values import trees

# -- attributes ------------------------------------------------------------------------------------
# Watches reads of attributes of modules, in one thread, without a change that others notice.

_ABSENT = trees.ABSENT
_LOCK = threading.RLock()


class _ThreadWatches(threading.local):
    watches: tuple[Watch, ...] = ()  # that are entered; a read counts for all of them
    updates = 0  # calls of a cache's `update` that run


_thread = _ThreadWatches()


def note(module: nn.Module, name: str, frame: FrameType | None = None) -> None:
    """An attribute of a module is read, by an instruction of this frame if it is known."""
    for watch in _thread.watches:
        watch.note(module, name, frame)


class Watch:
    """Notes reads of some attributes of a module and those inside, while entered.

    cached: the layer of a cache that belongs to the module.  Its number is not read where all that
    code does with it is to pass it to the cache's `update`; any other use of the cache sets `used`.
    """

    def __init__(
        self, module: nn.Module, places: Set[tuple[str, str]], cached: CachedLayer | None = None
    ) -> None:
        self.read: set[tuple[str, str]] = set()
        self.used = False
        self._cached = cached
        self._passed: list[tuple[tuple[str, str], int, range]] = []  # numbers on the way
        self._parts = {(id(module.get_submodule(path)), name): path for path, name in places}
        kinds = {(type(module.get_submodule(path)), name) for path, name in places}
        self._kinds = sorted(kinds, key=lambda item: (item[0].__qualname__, item[1]))
        self._held: list[Watched] = []

    def __enter__(self) -> Watch:
        _thread.watches = (*_thread.watches, self)
        with _LOCK:
            _watch_caches(self._cached, 1)
            for kind, name in self._kinds:
                watched = getattr(kind, name, _ABSENT)
                if not isinstance(watched, Watched):
                    watched = Watched(kind, name)
                    setattr(kind, name, watched)
                watched.users += 1
                self._held.append(watched)
        return self

    def __exit__(self, *exception: Any) -> None:
        _thread.watches = tuple([watch for watch in _thread.watches if watch is not self])
        with _LOCK:
            _watch_caches(self._cached, -1)
            while self._held:
                watched = self._held.pop()
                watched.users -= 1
                if not watched.users:
                    watched.remove()
        self.read.update(place for place, *_ in self._passed)
        self._passed.clear()

    def note(self, module: nn.Module, name: str, frame: FrameType | None) -> None:
        """An attribute of a module is read."""
        path = self._parts.get((id(module), name))
        if path is None:
            return
        call = None
        if frame is not None and name == _NUMBER and self._cached is not None:
            call = _update_with(frame.f_code, frame.f_lasti)
        if frame is None or call is None:
            self.read.add((path, name))
        else:
            self._passed.append(((path, name), id(frame), call))

    def uses(self, cache: Any, frame: FrameType | None = None, number: Any = None) -> None:
        """An attribute of a cache is read; with a frame, that calls `update` for this number."""
        if self._cached is None or cache is not self._cached.cache:
            return
        if frame is not None and number == self._cached.number:
            for passed in self._passed:
                if passed[1] == id(frame) and frame.f_lasti in passed[2]:
                    self._passed.remove(passed)
                    return
        self.used = True


class Watched:
    """A descriptor that reports when an attribute is read; it takes precedence over instances.

    users: how many watches need it.  inherited: the attribute that the class had under this name,
    as a class body defines it, not bound to anything.
    """

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name
        self._before = vars(kind).get(name, _ABSENT)
        self.users = 0
        self.inherited = next(
            (vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT
        )

    def remove(self) -> None:
        """The class is as it was."""
        if vars(self._kind).get(self._name) is not self:
            return  # somebody has set another one since
        if self._before is _ABSENT:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._before)

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self
        note(module, self._name, sys._getframe(1))
        inherited = self.inherited
        if self._name in vars(module) and not hasattr(type(inherited), "__set__"):
            return vars(module)[self._name]
        if inherited is _ABSENT:
            raise AttributeError(self._name)
        return inherited.__get__(module, kind) if hasattr(inherited, "__get__") else inherited

    def __set__(self, module: Any, value: Any) -> None:
        inherited: Any = self.inherited
        if hasattr(type(inherited), "__set__"):
            inherited.__set__(module, value)
        else:
            vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        if vars(module).pop(self._name, _ABSENT) is _ABSENT:
            raise AttributeError(self._name)


# -- caches ----------------------------------------------------------------------------------------
# A layer of transformers passes its number to `DynamicCache.update`, which reads and changes the
# cache's layer of that number and nothing else.  What code does beside that is watched.

_NUMBER = "layer_idx"
"""What the layers of transformers call their number."""
_cache_watches = 0  # that are entered, of all threads


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """The layer of a cache that belongs to a module."""

    cache: Any
    state: dict[str, Any]  # all that this layer of the cache holds, by name
    number: int
    kind: type

    @staticmethod
    def of(module: nn.Module, cache: Any) -> CachedLayer | None:
        """None where `update` of the cache is not transformers', or could do something else."""
        library: Any = sys.modules.get("transformers.cache_utils")
        if library is None or type(cache) is not library.DynamicCache:
            return None
        held = object.__getattribute__(cache, "__dict__")
        numbers = [vars(part)[_NUMBER] for part in module.modules() if _NUMBER in vars(part)]
        plain = {number for number in numbers if type(number) is int}
        layers, number = held["layers"], min(plain, default=-1)
        if len(plain) != 1 or not 0 <= number < len(layers) or held.get("offloading"):
            return None
        layer = layers[number]
        if type(layer) not in (library.DynamicLayer, library.DynamicSlidingWindowLayer):
            return None
        updates = type(cache).update, type(layer).update
        if any(update.__module__ != library.__name__ for update in updates):
            return None
        return CachedLayer(cache, vars(layer), number, type(layer))

    def become(self, state: Mapping[str, Any]) -> None:
        """The layer holds this, and nothing else."""
        self.state.clear()
        self.state.update(state)


def _watch_caches(cached: CachedLayer | None, more: int) -> None:
    """So many more watches want to know of uses of caches; the caller holds the lock."""
    global _cache_watches
    if cached is not None:
        _cache_watches += more
        kind: Any = type(cached.cache)
        if _cache_watches == 0:
            del kind.__getattribute__
        elif more > 0 and _cache_watches == 1:
            kind.__getattribute__ = _read_of_cache


def _read_of_cache(cache: Any, name: str) -> Any:
    value = object.__getattribute__(cache, name)
    if _thread.updates or name == "__class__":
        return value
    if name == "update":
        return functools.partial(_updated, cache, value)
    for watch in _thread.watches:
        watch.uses(cache)
    return value


def _updated(cache: Any, update: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `update` of a cache."""
    for watch in _thread.watches:
        watch.uses(cache, sys._getframe(1), args[2] if len(args) > 2 else None)
    _thread.updates += 1
    try:
        return update(*args, **kwargs)
    finally:
        _thread.updates -= 1


@functools.cache
def _update_with(code: CodeType, loaded: int) -> range | None:
    """Where a function's call runs whose third argument is what the instruction at `loaded` loads.

    None unless nothing but plain arguments of that call is loaded between.
    """
    import dis

    steps = list(dis.get_instructions(code))
    ends = [step.offset for step in steps[1:]] + [len(code.co_code)]
    behind = None  # how much is loaded after it
    for step, end in zip(steps, ends, strict=True):
        if behind is None:
            if step.offset <= loaded < end and step.opname == "LOAD_ATTR":
                behind = 0
        elif step.opname in ("CALL", "CALL_METHOD"):
            return range(step.offset, end) if step.argval - behind == 3 else None
        elif step.opname.startswith("LOAD_FAST") or step.opname == "LOAD_CONST":
            behind += dis.stack_effect(step.opcode, step.arg)
        elif step.opname != "PRECALL":
            return None
    return None


# -- outside ---------------------------------------------------------------------------------------
# State outside of modules that Python code reads: globals, closures, class attributes, contexts.
#
# A call may be repeated (see `calls`) only while this state is unchanged.  `Outside` watches
# which functions a call enters and remembers the state that each can see at that moment.  Code of
# torch and of the standard library is not looked into.

_DEPTH = 3
"""How deep objects inside objects are looked into."""
_MAX_ITEMS = 512
"""The most items of a container that are looked into; those of a larger one count as different."""
_HERE = __file__.rpartition("tracer")[0]
_TORCH = (torch.__file__ or "").rpartition("__init__")[0]
_STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})


class UnfollowableError(Exception):
    """Something was read that may change without a trace, such as an iterator."""


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere that holds a value: a name in a dictionary, a cell, or (key None) an object."""

    holder: Any
    key: str | None = None

    def value(self) -> Any:
        """The present value."""
        if isinstance(self.holder, CellType):
            return trees.cell_content(self.holder)
        if self.key is None:
            return self.holder
        value = self.holder.get(self.key, trees.ABSENT)
        return value.inherited if type(value) is Watched else value


class Outside:
    """State outside of modules that is visible to the functions that run while this is entered.

    followable: whether all of it can be compared later.  watches_draws: a call that draws from
    Python's generator, whose state other threads change too, cannot be.  Garbage collection is
    off inside, because its callbacks and finalizers would count as code of the call.
    """

    def __init__(self, watches_draws: bool = False) -> None:
        self.followable = True
        self._watches_draws = watches_draws
        self._entered = False
        self._before: dict[tuple[int, str | None], tuple[Place, list[Any]]] = {}
        self._seen: dict[int, CodeType] = {}
        self._local: set[CodeType] = set()
        self._closures: list[CodeType] = []

    def __enter__(self) -> Outside:
        if not _outside.active:
            if sys.getprofile() is not None:  # somebody profiles this thread: leave that alone
                self.followable = False
                return self
            _outside.profile = _watching(_outside, self._watches_draws)
            sys.setprofile(_outside.profile)
        elif sys.getprofile() is not _outside.profile:  # code has set its own, or see `Unwatched`
            self.followable = False
        _outside.active.append(self)
        _outside.entered.clear()
        self._entered = True
        collector_off.take()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._entered:
            _outside.active.remove(self)
            _outside.entered.clear()  # ids of codes that it alone has kept may be of others now
            if not _outside.active:
                sys.setprofile(None)
            collector_off.give_back()
        self._add_cells()

    def unchanged(self) -> bool:
        """Whether the state that was seen is as it was when first seen."""
        if not self.followable:
            return False
        try:
            return all(
                _same(before, _state_of(place.value())) for place, before in self._before.values()
            )
        except UnfollowableError:
            return False

    def include(self, other: Outside) -> None:
        """A call that is not run again stands for one with the state that `other` saw."""
        self.followable &= other.followable
        for key, seen in other._before.items():
            self._before.setdefault(key, seen)

    def enter(self, frame: FrameType) -> None:
        """A function begins to run."""
        code = frame.f_code
        if id(code) in self._seen or not self.followable:
            return
        self._seen[id(code)] = code  # kept, so that the id is not reused
        if not _looked_into(code.co_filename):
            return
        self._local.update(item for item in code.co_consts if isinstance(item, CodeType))
        try:
            for place in _places(frame):
                self._add(place)
        except UnfollowableError:
            self.followable = False
        if code.co_freevars and code not in self._local:
            self._add_closure(frame)

    def _add(self, place: Place) -> None:
        key = (id(place.holder), place.key)
        if key not in self._before:
            self._before[key] = place, _state_of(place.value())

    def _add_closure(self, frame: FrameType) -> None:
        """The free variables of a function: their contents, or their cells if those are plain."""
        values = frame.f_locals
        for name in frame.f_code.co_freevars:
            value = values.get(name, trees.ABSENT)
            try:
                if isinstance(value, trees.PLAIN):
                    self._closures.append(frame.f_code)
                else:
                    self._add(Place(value))
            except UnfollowableError:
                self.followable = False

    def _add_cells(self) -> None:
        """Find the cells of plain free variables; one that was rebound meanwhile says so itself."""
        if not self._closures or not self.followable:
            return
        if any(_rebinds(code) for code in self._seen.values() if _looked_into(code.co_filename)):
            self.followable = False
            return
        for function in gc.get_referrers(*self._closures):
            if isinstance(function, FunctionType):
                for cell in function.__closure__ or ():
                    place = Place(cell)
                    if isinstance(place.value(), trees.PLAIN):
                        self._add(place)
        self._closures.clear()


_PYTHONS: Any = random._inst
"""The generator behind the functions of `random`, also those that were imported by their names."""
_DRAWS = frozenset({_PYTHONS.random, _PYTHONS.getrandbits})
"""Its methods that all others draw with."""


class _OutsideThread(threading.local):
    def __init__(self) -> None:
        self.active: list[Outside] = []  # the watches that are entered; a function counts for all
        self.entered: set[int] = set()  # functions that all of them know, by the id of their code
        self.profile: Any = None  # the function that tells them


_outside = _OutsideThread()


def _watching(thread: _OutsideThread, draws: bool) -> Callable[[FrameType, str, Any], None]:
    """A profile function that tells the watches of a thread which functions begin."""
    active, known = thread.active, thread.entered

    def entered(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if id(frame.f_code) not in known:
                known.add(id(frame.f_code))
                for watch in active:
                    watch.enter(frame)
        elif draws and event == "c_call" and argument in _DRAWS:
            for watch in active:
                watch.followable = False

    return entered


class Unwatched:
    """Inside, code of torch and of rooftrace runs, and none that an `Outside` looks into.

    A profile function is called at every call and return, also of C, with a copy of the variables.
    From Python 3.12 on it stays on: there a change of it has all code instrumented again.
    """

    _CHEAP = sys.version_info < (3, 12)

    def __enter__(self) -> None:
        ours = self._CHEAP and sys.getprofile() is _outside.profile
        self._paused = ours and bool(_outside.active)
        if self._paused:
            sys.setprofile(None)

    def __exit__(self, *exception: Any) -> None:
        if self._paused:
            sys.setprofile(_outside.profile)


def include(other: Outside) -> None:
    """All that are entered now see the state that `other` saw."""
    for active in _outside.active:
        active.include(other)


@functools.cache
def _looked_into(file: str) -> bool:
    standard = file.startswith(_STANDARD) and not file.startswith(_INSTALLED)
    return not standard and not file.startswith((_HERE, _TORCH, "<frozen"))


def _rebinds(code: CodeType) -> bool:
    """Whether a function assigns to a variable of the function around it (`nonlocal`)."""
    import dis

    free = set(code.co_freevars)
    return bool(free) and any(
        step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in free
        for step in dis.get_instructions(code)
    )


def _places(frame: FrameType) -> Iterator[Place]:
    """The places that a function can reach by name when it begins, besides its arguments."""
    code, names = frame.f_code, frame.f_globals
    for name in code.co_names:
        if name in names:
            value = names[name]
            yield Place(names, name)
            if isinstance(value, (type, ModuleType)) and not _is_library(value):
                yield from _attributes(value, code)
    if code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])
        kind = first if isinstance(first, type) else type(first)
        if not _is_library(kind):
            for base in kind.__mro__:
                if not _is_library(base):
                    yield from _attributes(base, code)
        function = getattr(getattr(kind, code.co_name, None), "__func__", None)
        yield from _defaults(function or getattr(kind, code.co_name, None), code)
    yield from _defaults(names.get(code.co_name), code)


def _attributes(owner: type | ModuleType, code: CodeType) -> Iterator[Place]:
    held: Mapping[str, Any] = vars(owner)
    for place in (Place(held, name) for name in code.co_names):
        value = place.value()
        if value is not trees.ABSENT and not callable(value) and not hasattr(value, "__get__"):
            yield place


def _defaults(function: Any, code: CodeType) -> Iterator[Place]:
    """Default arguments and attributes of a function, which calls of it share."""
    if isinstance(function, FunctionType) and function.__code__ is code:
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not isinstance(value, trees.PLAIN):
                yield Place(value)
        if function.__dict__:
            yield Place(function.__dict__)


def _is_library(owner: type | ModuleType) -> bool:
    home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    top = home.partition(".")[0]
    return top in ("torch", "rooftrace") or top in sys.stdlib_module_names


def _state_of(value: Any) -> list[Any]:
    state: list[Any] = []
    _collect(value, _DEPTH, set(), state)
    return state


def _collect(value: Any, depth: int, seen: set[int], state: list[Any]) -> None:
    """Append the state of a value: objects by identity, and their contents.

    Raises UnfollowableError for an object that may change where nobody sees it.
    """
    state.append(value)
    if isinstance(value, trees.PLAIN) or id(value) in seen:
        return
    if isinstance(value, (type, ModuleType, logging.Logger)):
        return  # a class and a module by the names that code reads of them; a logger has caches
    seen.add(id(value))
    if isinstance(value, Tensor):
        state.append(0 if value.is_inference() else value._version)
        return
    if type(value) in _TELLS:
        state.append(_TELLS[type(value)](value))
        return
    if isinstance(value, contextvars.ContextVar):
        _collect(value.get(trees.ABSENT), depth, seen, state)
        return
    if hasattr(value, "__next__") or hasattr(value, "bit_generator"):
        raise UnfollowableError
    if depth == 0:
        return
    if isinstance(value, dict):
        _items(value, depth, seen, state)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        state.append(len(value))
        if len(value) > _MAX_ITEMS:
            state.extend(value)
        else:
            for item in value:
                _collect(item, depth - 1, seen, state)
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        _items(held, depth, seen, state)


def _items(held: Mapping[Any, Any], depth: int, seen: set[int], state: list[Any]) -> None:
    state.append(len(held))
    if len(held) > _MAX_ITEMS:
        state.extend(itertools.chain(held, held.values()))
        return
    for key, item in held.items():
        state.append(key)
        _collect(item, depth - 1, seen, state)


_TELLS: dict[type, Callable[[Any], str]] = {
    random.Random: lambda value: repr(value.getstate()),
    torch.Generator: lambda value: repr(bytes(value.get_state().untyped_storage())),
}
"""Objects whose state a method returns (`getstate`, `get_state`)."""


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        a is b or (type(a) is type(b) and isinstance(a, trees.PLAIN) and a == b)
        for a, b in zip(before, after, strict=True)
    )
