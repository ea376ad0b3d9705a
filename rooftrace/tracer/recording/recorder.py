"""The recorder: runs any code on meta tensors and records every aten op on a tape.

A dispatch mode sees the ops that run (in-place ops, views, autograd's backward, the optimizer), a
function mode the torch-level names, module hooks the paths.  `running` handles one op;
nothing is priced here.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.graph import assumptions
from rooftrace.tracer import source
from rooftrace.tracer.recording import (
    groups,
    library,
    overrides,
    realdata,
    taperecords,
    threads,
)
from rooftrace.tracer.recording.autocast import followed
from rooftrace.tracer.recording.functions import Functions, backward_kept, calls_watched, uncompiled
from rooftrace.tracer.recording.higher_order import (
    flex_whole,
    higher_order_dispatched,
    run_higher_order,
)
from rooftrace.tracer.recording.ops import info_of
from rooftrace.tracer.recording.overrides import Scope, original_of, replaced
from rooftrace.tracer.recording.realdata import RealData
from rooftrace.tracer.recording.recurrent import kept_whole
from rooftrace.tracer.recording.releases import Release
from rooftrace.tracer.recording.running import Runner
from rooftrace.tracer.recording.substitutes import draws_repeated
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.recording.taperecords import META_KEY, Recorded
from rooftrace.tracer.recording.threads import (
    device_calls_quiet,
    jagged_attention_fused,
    plain_imports,
    static_caches_counted,
    warnings_quiet,
)
from rooftrace.tracer.repeats import CallReplay, Loop, Rolling, Twin, Unwatched
from rooftrace.tracer.sharding import ddp, fsdp
from rooftrace.tracer.torch_private import (
    DisableTorchFunction,
    HigherOrderOperator,
    TorchDispatchMode,
    disable_current_modes,
    get_current_dispatch_mode,
    get_current_dispatch_mode_stack,
    get_tracing_state,
)
from rooftrace.tracer.values import META, Values, trees


class Recorder(TorchDispatchMode, Tape):
    """Records the ops of whatever runs inside `with recorder:` on meta tensors.

    record=False keeps only known values (to build modules).  own_step: the code is a
    complete step of the user's (see `Entries`).  roll_loops: run only a few turns of each scan (see
    rolling/loops); `loops` has these scans by serial number.  repeat_calls: run only the first of
    equal calls of modules (see replay/calls), also in `trained`, but for run_apart: layers whose
    first is at one of these paths, "" for all.  release: of PyTorch, whose kernels of CUDA run;
    None for the one that is installed.  After use, `close` takes our tags off tensors that
    outlive the capture.
    """

    supports_higher_order_operators = True
    runs_whole = True
    lends_modules = True  # sharded modules are on meta while it records, and as before afterwards

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard around every op: nothing is compiled while we record (see `__enter__`).

        torch.utils._python_dispatch asks this when the class is made.
        """
        return False

    def __init__(
        self,
        values: Values | None = None,
        record: bool = True,
        own_step: bool = False,
        roll_loops: bool = True,
        repeat_calls: bool = True,
        run_apart: Collection[str] = (),
        release: Release | None = None,
    ) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.repeat_calls, self._run_apart, self._own_step = repeat_calls, run_apart, own_step
        Tape.__init__(self, values or Values(), record)
        self.values.compute = self._from_data
        self.values.finite = self._finite
        self.values.where = lambda: self.here.path
        self._rolling = self.rolling = Rolling(self, enabled=record and roll_loops)
        self._runner = Runner(self, self.again)
        self.scope = Scope(release)
        self._followers = threads.Threads(self, self.__torch_dispatch__, self.scope, self.functions)
        self._exit, self._of_graph = contextlib.ExitStack(), contextlib.ExitStack()

    def begin(self, record: bool) -> None:
        """Begin another, empty graph; `record`: whether ops enter it."""
        super().begin(record)
        self.entries.own_step = self._own_step
        self.failed_in: tuple[str, str] | None = None  # path and class of the module that failed
        self.failed_op: tuple[Exception, str] | None = None  # an error, and the op that raised it
        self._real = RealData(self)
        self._module_calls = CallReplay(self, record and self.repeat_calls, self._run_apart)
        self.storages = Storages(self)
        self._roots: list[nn.Module] = []

    @property
    def loops(self) -> dict[int, Loop]:
        """The loops that were cut short, by serial number."""
        return self._rolling.loops

    def name_modules(self, root: nn.Module) -> None:
        """Use the dotted paths of `root` for its modules and the tensors that they hold."""
        self._roots.append(root)
        self.tags.hosts.update(map(trees.bytes_of, fsdp.on_host(root)))
        self.shards.mesh = fsdp.mesh_of(self._roots)
        self._rolling.watch(root)
        self._module_calls.watch(root)
        super().name_modules(root)

    def trained(self) -> AbstractContextManager[None]:
        """Inside, a module is called and one backward runs, without another graph.

        Raises UnlikeLayersError at the end where layers were repeated that may not be alike.
        """
        return self._module_calls.stacks.trained()

    def twins(self) -> Iterator[Twin]:
        """Ops that were recorded again, one by one as in a block that calls repeat."""
        return self._module_calls.stacks.twins()

    def _from_data(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor from the caller's real ones; see `realdata`."""
        if not self.recording or type(tensor) is not Tensor:
            return None
        value = self._real.value(tensor)
        if value is not None:
            self.rolling.depends()
        return value

    def _finite(self, tensor: Tensor) -> bool | None:
        made = self.tags.made_by(tensor)
        return None if made is None else realdata.of_finite_numbers(made[0])

    def forget(self) -> None:
        """Free the memory of the graph after it is lowered."""
        self._real.forget()
        super().forget()

    # -- ops ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(trees.is_wrapper(kind) for kind in types):
            return NotImplemented  # its ops on the tensors inside are recorded
        instead = library.behind(func) or _noted_as(func)
        if instead is not None:  # an op of ours, shown to modes of the user's under another name
            with self.again():
                return instead(*args, **kwargs)
        with self.lock, overrides.untraced():
            return self._dispatched(func, args, kwargs)

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        higher_order = isinstance(func, HigherOrderOperator)
        outer, self.values.op = self.values.op, func.name() if higher_order else info_of(func).name
        try:
            if higher_order:
                return run_higher_order(self, self.again, func, args, kwargs)
            with DisableTorchFunction():  # functions called from here on name no op
                if self.values.op.startswith("aten.") and get_current_dispatch_mode() is None:
                    with Unwatched():  # no code of others handles the op
                        return self._runner.run(func, args, kwargs)
                return self._runner.run(func, args, kwargs)
        except Exception as error:
            if self.failed_op is None or self.failed_op[0] is not error:
                self.failed_op = error, self.values.op
            raise
        finally:
            self.values.op = outer

    # -- modules -----------------------------------------------------------------------------------

    def here_recorded(self) -> bool:
        """Whether the running thread is recorded by this recorder, and by none inside of it."""
        return Scope.current() is self.scope

    def before_call(self, module: nn.Module) -> None:
        """A module is called, in a thread that is recorded or in one that nobody records."""
        if self.paths.is_transparent(module):
            return
        here = self.here
        if not self.here_recorded():
            if not self.paths.is_named(module) or get_current_dispatch_mode() is not None:
                return  # a thread of somebody else
            leave = self._followers.enter_here(META, self.threads.leader)
            if leave is None:
                return
            here.leave = leave
        if not here.stack:
            here.devices = overrides.device_modes()
        with self.lock:
            here.call(module, *self.paths.called(module, here.path))

    def after_call(self, module: nn.Module) -> None:
        """A call of a module ends, in a thread that is recorded."""
        here = self.here
        running = any(module is other for other in here.modules)
        if self.paths.is_transparent(module) or not running:
            return
        if sys.exc_info()[0] is not None and self.failed_in is None:
            self.failed_in = (here.path, type(module).__name__)
        here.end_call()
        if not here.stack and here.leave is not None:
            here.leave()

    def answer(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, or give the result of an equal call."""
        return self._module_calls.answer(module, *args, **kwargs)

    def _settle(self) -> None:
        """Wait for threads of the code that it did not join."""
        self._followers.settle()

    def functions(self, device: torch.device | None = None) -> Functions:
        """The function mode of one thread; device: where it makes tensors, if no mode decides."""
        return Functions(self, device)

    # -- the capture -------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        with contextlib.ExitStack() as undo:  # an error halfway leaves nothing behind
            self._enter(undo.enter_context)
            overrides.push(self)
            self.live = True
            self._exit = undo.pop_all()
        return self

    def _enter(self, enter: Callable[[AbstractContextManager[Any]], Any]) -> None:
        enter(self.scope.entered())
        enter(warnings_quiet())
        enter(kept_whole())
        enter(flex_whole(self))
        enter(higher_order_dispatched())
        enter(static_caches_counted())
        enter(device_calls_quiet())
        enter(plain_imports())
        enter(jagged_attention_fused())
        enter(draws_repeated(self))
        enter(backward_kept(self))
        enter(followed())
        enter(uncompiled())
        enter(vars(torch.jit)["optimized_execution"](False))  # op by op; of this thread
        enter(torch.autograd.set_multithreading_enabled(False))  # of this thread
        enter(calls_watched(self))
        enter(self._rolling.injected())
        enter(self.functions())
        self._of_graph = enter(contextlib.ExitStack())
        self._enter_graph()
        enter(groups.sizes_unseen())
        enter(self._followers.followed())

    def _enter_graph(self) -> None:
        """Enter the contexts that last as long as one graph is recorded."""
        enter, storages, lent = self._of_graph.enter_context, self.storages, self.lends_modules
        enter(fallbacks_noted(self.values))
        enter(self._module_calls.injected())
        seen, assume = (storages.gathered, storages.resized), self.values.assume
        enter(fsdp.fully_sharded(self._roots, *seen, assume, lent))
        enter(ddp.replicated(self._roots, self.paused, self.enter, assume))

    def end_graph(self) -> None:
        """The graph is done, though the recorder is on: live storages survive it."""
        with disable_current_modes():
            self._of_graph.close()
        self.tags.end()

    def begin_graph(self, record: bool, prepare: Callable[[], None]) -> None:
        """Begin another graph (see `begin`), once `prepare` has been called."""
        self.begin(record)
        prepare()
        with disable_current_modes():
            self._enter_graph()

    def __exit__(self, *exception: Any) -> Any:
        try:
            self._settle()
        finally:
            with self.lock:
                self.live = False
            overrides.pop(self)
            self._exit.close()
            self.tags.end()


def _noted_as(func: Any) -> Any:
    """The op that torch.jit.trace notes in place of one, which it does not see below a mode."""
    traced = func is torch.ops.aten.convolution.default and get_tracing_state()
    return _convolution if traced else None


def _convolution(*args: Any) -> Any:
    with overrides.traced():
        return torch.ops.aten._convolution.default(*args, False, False, False, False)


def check_not_inside(action: str, instead: str) -> None:
    """Raise RequestError in a thread that a recording follows.  instead: advice."""
    modes = get_current_dispatch_mode_stack()
    if any(isinstance(mode, Recorder | threads.Follower) for mode in modes):
        raise RequestError(
            f"{action} inside of another recording (a capture, a trace, a script that is run), "
            f"whose modules stand on the meta device: {instead}"
        )


# -- storages --------------------------------------------------------------------------------------
# Weights that are unsharded for a while: storages that are freed, and allocated again.


class Storages:
    """Changes of storages by no op: freed, allocated, filled with unsharded weights."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._before: list[tuple[Tensor, str]] = []  # unsharded weights, and their names

    def resized(self, storage: Any, size: int) -> None:
        """The bytes of a storage are freed (size 0) or allocated again; tensors stay."""
        tape = self._tape
        entered = tape.entries.first_of(storage._cdata)
        tag = tape.tags.owner(storage._cdata) or (entered is not None and tape.tags.of(entered))
        if not tag or not tape.recording:
            return
        held = taperecords.picked_in(tape.graph, tag)
        self._record(torch.ops.rooftrace.resize_storage.default, held, size)

    def brought(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that enter now come from the host now, and were not there before."""
        tape = self._tape
        tags = [tag for tag in map(tape.tags.of, tensors) if tag is not None]
        if not tape.recording or tape.tags.last is None or not tags:
            return
        nodes = [taperecords.picked_in(tape.graph, tag) for tag in tags]
        self._record(torch.ops.rooftrace.bring_storages.default, nodes)

    def _record(self, op: Any, *args: Any) -> None:
        """Add an op to the graph that the code does not call."""
        tape = self._tape
        made = tape.graph.create_node("call_function", op, args)
        origin = tape.origins.origin(op.name(), tape.rolling.label)
        made.meta[META_KEY] = Recorded((), origin, stream=fsdp.current_stream())
        tape.tags.last = made

    def gathered(self, weight: Tensor, shard: Tensor) -> None:
        """`weight` is unsharded while its module runs; `shard` is a part of it."""
        name, storage = self._tape.name_of(shard), self._tape.storage_of(weight)
        if storage is not None:
            self._tape.shards.unsharded[storage] = name
        elif not self._tape.recording:
            self._before.append((weight, name))

    def enter_gathered(self) -> None:
        """Unsharded weights that were gathered before the step become values that no op made."""
        for weight, name in self._before:
            self._tape.enter(weight, "parameter", name)
        self._before.clear()


# -- fallbacks -------------------------------------------------------------------------------------
# Code that runs because a package is missing, by the warning of the library that falls back.
#
# Libraries that have kernels in other packages run a slower form without them, and log a
# warning.  Warnings of the traced code that say so are quoted as assumptions, whose value says
# where the function stands that runs instead (`lower.with_fallbacks` looks which ops it called).


_SAYS_SO = re.compile(r"\bfall(s|ing)?[ -]back\b", re.IGNORECASE)
_WARNINGS = ("warning", "warning_once")
"""Methods of loggers that warn: transformers adds the second, which warns once a process."""


@contextlib.contextmanager
def fallbacks_noted(values: Values) -> Iterator[None]:
    """Inside, a warning by which the code says that it falls back is an assumption, too."""
    there = [name for name in _WARNINGS if hasattr(logging.Logger, name)]
    said: set[str] = set()  # one way to warn calls another
    with replaced(logging.Logger, {name: _noting(values, name, said) for name in there}):
        yield


def _noting(values: Values, name: str, said: set[str]) -> Callable[..., Any]:
    def warn(logger: logging.Logger, message: Any, *args: Any, **kwargs: Any) -> Any:
        text = str(message)
        if _SAYS_SO.search(text) and text not in said:
            said.add(text)
            values.assume(assumptions.FALLBACK, " ".join(text.split()), _instead(), where="")
        return original_of(logging.Logger, name)(logger, message, *args, **kwargs)

    return warn


def _instead() -> str:
    """ "file.py:12-40" of the code that runs instead: a function of the warning code, or its class.

    "" where neither is there.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and not source.is_users(frame.f_code):
        frame = frame.f_back
    names = {} if frame is None else frame.f_locals
    held = [inspect.unwrap(value) for value in names.values() if inspect.isfunction(value)]
    owner = names.get("self")
    held += [type(owner)] if isinstance(owner, nn.Module) else []
    for item in held:
        with contextlib.suppress(OSError, TypeError):
            code, first = inspect.getsourcelines(item)
            file = source.relative(inspect.getsourcefile(item) or "")
            return f"{file}:{first}-{first + len(code) - 1}"
    return ""
