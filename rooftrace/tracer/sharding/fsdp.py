"""FSDP2 modules and device meshes on meta, with streams of a device that is not there."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.graph import marks
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import original_of, replaced
from rooftrace.tracer.recording.groups import forget_meshes
from rooftrace.tracer.sharding.ddp import replicas_on_meta
from rooftrace.tracer.values import trees

# -- streams ---------------------------------------------------------------------------------------
# Streams of a device that is not there: which one work is put on, and which waits for which.
#
# They stand for `torch.cuda.Stream` and `torch.cuda.Event` in code that asks a mesh for its device.
# An event is an op in the recording (see `collectives.marks`), so its order among the work is kept.

_Library: Any = torch.library.Library
_library = _Library("rooftrace", "FRAGMENT")
_library.define(f"{marks.RECORD_EVENT.partition('.')[2]}() -> Tensor")
_library.define(f"{marks.WAIT_EVENT.partition('.')[2]}(Tensor event) -> ()")
_library.define(f"{marks.RESIZE_STORAGE.partition('.')[2]}(Tensor(a!) self, int size) -> ()")
_library.define(f"{marks.FREE_STORAGES.partition('.')[2]}(Tensor[] tensors) -> ()")
_library.define(f"{marks.BRING_STORAGES.partition('.')[2]}(Tensor[] tensors) -> ()")


def _nothing(*args: Any) -> None:
    pass


_EVERYWHERE = "CompositeExplicitAutograd"
_library.impl("record_event", lambda: torch.empty(0, device="meta"), _EVERYWHERE)
for _mark in ("wait_event", "resize_storage", "free_storages", "bring_storages"):
    _library.impl(_mark, _nothing, _EVERYWHERE)
_OPS: Any = torch.ops.rooftrace


_numbers = itertools.count(1)


class Event:
    """A point on a stream that others wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._token: torch.Tensor | None = None

    def record(self, stream: Stream | None = None) -> None:
        """The event is when all that is on the stream now is done."""
        with _On(stream or _here.stream):
            self._token = _OPS.record_event()

    def wait(self, stream: Stream | None = None) -> None:
        """The stream goes on after the event."""
        if self._token is not None:
            with _On(stream or _here.stream):
                _OPS.wait_event(self._token)

    def query(self) -> bool:
        """Whether the event has come: nothing waits here."""
        return True

    def synchronize(self) -> None:
        """The host would wait; nothing runs."""


class Stream:
    """A queue of the device; name: its purpose, "" for the main one."""

    def __init__(self, device: Any = None, priority: int = 0, name: str | None = None) -> None:
        self.name = f"stream {next(_numbers)}" if name is None else name

    def wait_event(self, event: Event) -> None:
        """Later work of this stream starts after the event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Later work of this stream starts after the present work of the other stream."""
        if stream is not self:
            self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """An event after the work on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all is done: nothing runs."""
        return True

    def synchronize(self) -> None:
        """The host would wait; nothing runs."""


MAIN = Stream(name="")


class _ThreadStream(threading.local):
    """The stream of one thread."""

    def __init__(self) -> None:
        self.stream = MAIN


_here = _ThreadStream()


class _On:
    """The context in which a stream is the current one of its thread."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream, self._outer = stream or _here.stream, MAIN

    def __enter__(self) -> None:
        self._outer, _here.stream = _here.stream, self._stream

    def __exit__(self, *exception: Any) -> None:
        _here.stream = self._outer


def current_stream() -> str:
    """The name of the stream that the running thread puts work on; "" is the main one."""
    return _here.stream.name


def select(stream: Stream) -> None:
    """From here on the running thread puts work on this stream."""
    _here.stream = stream


class DeviceModule:
    """Stands for the module of a device (`torch.cuda`) in the code of a mesh."""

    Stream, Event, stream = Stream, Event, _On

    @staticmethod
    def current_stream(device: Any = None) -> Any:
        """The stream that the running thread puts work on."""
        return _here.stream

    @staticmethod
    def current_device() -> int:
        """There is one."""
        return 0

    @staticmethod
    def is_available() -> bool:
        """It stands for one."""
        return True

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """The host would wait; nothing runs."""


# -- fsdp ------------------------------------------------------------------------------------------
# Modules that `fully_shard` has sharded (FSDP2), run on the meta device.
#
# They keep their hooks, order of prefetches and streams.  What is replaced while they are
# recorded is the device that they ask for, and the check that refuses weights on meta.

_META = torch.device("meta")


@contextlib.contextmanager
def fully_sharded(
    roots: Iterable[nn.Module],
    unsharded: Callable[[Tensor, Tensor], None],
    resized: Callable[[Any, int], None],
    say: Callable[[str, str], object],
    lent: bool = True,
) -> Iterator[None]:
    """Inside, FSDP2 modules below these roots run on meta; nothing happens where there are none.

    unsharded: called with each tensor that holds an unsharded weight, and its shard.
    resized: called with each storage that is freed or allocated again, and its new size in bytes.
    say: called with the kind and the text of each assumption.
    lent: whether the modules are on meta for the length of the block only.  Those of a script stay
    on the device that it sees, with its streams.
    """
    states = _states(roots)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_storages_watched(resized))
        for home, names in stages_alone(say) if running else ():
            undo.enter_context(replaced(home, names))
        if states or not lent:
            _watch_weights(undo, unsharded)
        if states and lent:
            _replace_functions(undo)
            for state in states:
                _lend(undo, state)
        yield


def _states(roots: Iterable[nn.Module]) -> list[Any]:
    """The FSDP2 states of modules, each once."""
    home = sys.modules.get(f"{torch_private.FULLY_SHARD}._fsdp_state")
    if home is None:
        return []
    states = (home._get_module_fsdp_state(m) for root in roots for m in trees.modules_in(root))
    return list({id(state): state for state in states if state is not None}.values())


def is_real(root: nn.Module) -> bool:
    """Whether a module below this one was sharded with weights that are not on meta.

    Such a module cannot be copied to meta: its hooks know the original only.
    """
    weights = (p.sharded_param for s in _states([root]) for g in _groups(s) for p in g.fsdp_params)
    return any(not weight.is_meta for weight in weights)


def _modules(*names: str) -> Iterator[ModuleType]:
    for name in names:
        module = sys.modules.get(f"{torch_private.FULLY_SHARD}.{name}")
        if module is not None:
            yield module


def on_host(root: nn.Module) -> Iterator[Tensor]:
    """Shards of weights that FSDP2 keeps in the memory of the host (`CPUOffloadPolicy`)."""
    for group in (g for state in _states([root]) for g in _groups(state)):
        yield from (p._sharded_param_data for p in group.fsdp_params if p.offload_to_cpu)


def is_offloaded(weight: Tensor) -> bool:
    """Whether a weight is a shard in the memory of the host, of a mesh of devices
    (`CPUOffloadPolicy`)."""
    mesh = getattr(weight, "device_mesh", None)
    return mesh is not None and weight.device.type == "cpu" != mesh.device_type


def _watch_weights(undo: contextlib.ExitStack, unsharded: Any) -> None:
    for params in _modules("_fsdp_param"):
        param = params.FSDPParam
        make = original_of(param, "init_all_gather_outputs")
        undo.enter_context(replaced(param, {"init_all_gather_outputs": _watched(make, unsharded)}))


def _watched(make: Any, unsharded: Any) -> Any:
    def init_all_gather_outputs(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for tensor in self.all_gather_outputs:
            unsharded(tensor, self.sharded_param)

    return init_all_gather_outputs


def _replace_functions(undo: contextlib.ExitStack) -> None:
    for module in _modules(
        "_fsdp_collectives", "_fsdp_param_group", "_fsdp_state", "_fsdp_common", "_fsdp_param"
    ):
        if hasattr(module, "_get_device_handle"):
            undo.enter_context(replaced(module, {"_get_device_handle": lambda kind: DeviceModule}))
    (groups,) = _modules("_fsdp_param_group")
    context, group = groups.FSDPCommContext, groups.FSDPParamGroup
    begin = original_of(context, "lazy_init")

    def lazy_init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        for name, item in vars(self).items():
            if isinstance(item, Stream):
                item.name = name.removesuffix("_stream")

    checks = ("_validate_no_meta_params", "_validate_cpu_offload_params")
    undo.enter_context(replaced(group, dict.fromkeys(checks, _nothing)))
    undo.enter_context(replaced(context, {"lazy_init": lazy_init}))


def refuse_flat(root: nn.Module) -> None:
    """Raise RequestError for FSDP1, whose flat weights have views that meta tensors cannot be."""
    home = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    kind = getattr(home, "FullyShardedDataParallel", ())
    if any(isinstance(part, kind) for part in trees.modules_in(root)):
        path = next(path for path, part in root.named_modules() if isinstance(part, kind))
        raise RequestError(
            f"FullyShardedDataParallel (FSDP1) at {path or 'the root'} of {type(root).__name__}: "
            "it is traced in a script only (rooftrace run torchrun ... train.py); shard the module "
            "with fully_shard (FSDP2), or run its script"
        )


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of a state: newer releases of torch have several."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _lend(undo: contextlib.ExitStack, state: Any) -> None:
    """A state on meta, until the block ends; then it is as before, its weights sharded."""
    for group in _groups(state):
        for param in group.fsdp_params:
            undo.callback(param._setattr_on_modules, param.sharded_param)
            _kept(undo, param)
            param.device = _META
        _kept(undo, group)
        group.device, group.device_handle = _META, DeviceModule
    for item in (state._comm_ctx, state._state_ctx, state):
        _kept(undo, item)
    state._device, state._device_handle = _META, DeviceModule
    vars(state._comm_ctx).clear()


def stage(root: nn.Module) -> Callable[[], None]:
    """Let FSDP2 modules below this one run as in `torch.distributed.pipelining.PipelineStage`.

    A backward keeps weights whole and adds gradients up; the function that is returned reduces
    them and shards the weights, after the last microbatch (`perform_reduce_grad` of torch 2.13).
    """
    states = _states([root])

    def tell(last: bool) -> None:
        for state in states:
            state._state_ctx.is_last_backward = last
            for group in _groups(state):
                group.reshard_after_backward = group.reduce_grads = last

    def reduce() -> None:
        tell(True)
        for state in states:
            for group in _groups(state):
                group.post_backward()
        for state in states:
            if state._is_root:
                state._root_post_backward_final_callback()

    tell(False)
    return reduce


def whole_gradients(root: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The shards of the weights of FSDP2 modules, and gradients that are not reduced yet."""
    for state in _states([root]):
        for group in _groups(state):
            for param in group.fsdp_params:
                whole = getattr(param, "_unsharded_param", None)
                added = param.unsharded_accumulated_grad
                pending = whole.grad if added is None and whole is not None else added
                yield param.sharded_param, pending


_CONTAINERS = (list, dict, set)


def _kept(undo: contextlib.ExitStack, item: Any) -> None:
    """Give an object its attributes back at the end of the block, containers with their items."""
    attributes = vars(item)
    before = {
        name: value.copy() if type(value) in _CONTAINERS else value
        for name, value in attributes.items()
    }

    def restore() -> None:
        attributes.clear()
        attributes.update(before)

    undo.callback(restore)


@contextlib.contextmanager
def _storages_watched(resized: Callable[[Any, int], None]) -> Iterator[None]:
    """Inside, calls that free the bytes of a live tensor are seen."""
    kind = torch.UntypedStorage
    original = kind.resize_

    def resize_(self: Any, size: int) -> Any:
        before = self.nbytes()
        result = original(self, size)
        if self.nbytes() != before:
            resized(self, self.nbytes())
        return result

    with replaced(kind, {"resize_": resize_}):
        yield


# -- stages of torch -------------------------------------------------------------------------------


BUBBLE = (
    "a stage of a pipeline: the time for which this process waits for others (the bubble) is not "
    "counted; its sends and receives are"
)


STAGE = "torch.distributed.pipelining.stage"


def stages_alone(say: Callable[[str, str], object]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Modules and their functions by which torch's stages agree with processes that are not there.

    They vote whether all know their sizes, and send them where one does not.  say: called with the
    kind and the text of each assumption.
    """
    stage: Any = sys.modules.get(STAGE)
    kind = getattr(stage, "PipelineStage", None)
    if not hasattr(kind, "_warmup_forward_vote"):  # older stages ask nobody
        return

    def vote(self: Any, has_backward: bool = True, **others: Any) -> Any:
        say("communication", BUBBLE)
        if stage.InferenceMode.needs_dynamic(self._user_meta, has_backward):
            raise RequestError(
                f"PipelineStage {self.stage_index} of {self.num_stages} has no sizes of its own, "
                "and asks other processes, which are not there: pass input_args and output_args "
                "(for tensors of a mesh input_grads and output_grads, too)"
            )
        return torch.ones((), device="cpu", dtype=torch.int32)

    def agreed(self: Any, received_result: Any = None) -> Any:
        return torch.ones((), device="cpu", dtype=torch.int32)

    yield torch.random, {"fork_rng": _forked}
    yield kind, {"_warmup_forward_vote": vote, "_warmup_backward_result": agreed}


def _forked(*args: Any, device_type: str | None = "cuda", **kwargs: Any) -> Any:
    """Stands for `torch.random.fork_rng`: meta has no random numbers to keep."""
    if device_type == "meta":
        return contextlib.nullcontext()
    return original_of(torch.random, "fork_rng")(*args, device_type=device_type, **kwargs)


# -- meshes ----------------------------------------------------------------------------------------

_BACKENDS = "cpu:fake,cuda:fake,meta:fake"
"""Collectives of these devices return at once, with local data."""


def begin_group(init: Callable[..., Any], world: int, rank: int, **options: Any) -> None:
    """Let this process be one of `world` that are not there: it gets a default process group.

    init: torch's `init_process_group`.  options: further ones of it.
    """
    import torch.distributed as dist

    shown = sys.excepthook
    init(_BACKENDS, store=torch_private.FakeStore(), rank=rank, world_size=world, **options)
    sys.excepthook = shown  # torch's names a rank before every error, to the end of the process
    # A group finds its backend where hooks are read; else torch warns at the end.
    kind = dist.ProcessGroup.BackendType.CUSTOM
    torch_private.get_default_group()._set_default_backend(kind)


running: list[Mapping[str, int]] = []
"""The meshes that stand for processes that are not there, innermost last."""


def mesh_of(roots: Iterable[nn.Module]) -> dict[str, int]:
    """How many processes there are along each axis of the largest mesh of these modules.

    It is that of the running `fake_mesh`, if there is one.  Axes without a name are called "axis 0"
    and so on.  {} where no module is sharded.
    """
    if running:
        return dict(running[-1])
    meshes = [*_meshes(list(roots))]
    if not meshes:
        return {}
    largest = max(meshes, key=lambda mesh: int(mesh.mesh.numel()))
    sizes = list(largest.mesh.shape)
    names = largest.mesh_dim_names or [f"axis {number}" for number in range(len(sizes))]
    return dict(zip(names, map(int, sizes), strict=True))


def _meshes(roots: list[nn.Module]) -> list[Any]:
    """The root meshes of the weights of modules."""
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    over: dict[int, Any] = {}
    for root in roots if kind is not None else ():
        for tensor in trees.tensors_of(root):
            if isinstance(tensor, kind):
                over[id(tensor.device_mesh)] = tensor.device_mesh
    for state in _states(roots):
        for group in _groups(state):
            over[id(group.mesh_info.mesh)] = group.mesh_info.mesh
    return [_root(mesh) for mesh in over.values()]


def _root(mesh: Any) -> Any:
    """The mesh that a submesh was cut from."""
    cut_from = getattr(mesh, "_get_root_mesh", None)
    return mesh if cut_from is None else cut_from()


def named_groups(mesh: Any, renamed: Mapping[str, str]) -> dict[str, str]:
    """The names of the groups along each axis of a mesh, with the axis as the user calls it."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False)
    return {
        str(mesh.get_group(axis).group_name): renamed.get(axis, axis)
        for axis, size in sizes
        if size > 1
    }


_devices: list[Any] = []


def devices() -> Any:
    """The DeviceMesh of the running `fake_mesh`."""
    return _devices[-1]


axes: dict[str, str] = {}
"""Axes of groups by their name, where ranks do not say it: experts share the ranks of data."""


# -- processes that are not there: one stands for all of a mesh ------------------------------------


@contextlib.contextmanager
def fake_mesh(sizes: Mapping[str, int], rank: int = 0) -> Iterator[Any]:
    """A `DeviceMesh` of processes that are not there, for the length of the block.

    sizes: how many there are along each axis, outermost first: `{"dp": 4, "tp": 8}`.  rank: which
    of them this one is.  `build(mesh)` shards a module over it (`fully_shard`,
    `parallelize_module`), and a trace of that module is the step of one process.  Raises
    RequestError for sizes that are no mesh, for an axis that it has not, and where this process
    belongs to a process group already.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = _world(sizes, rank)
    if dist.is_initialized():
        raise RequestError(
            f"a mesh {shown(sizes)}: this process is in a process group of "
            f"{dist.get_world_size()} already; call torch.distributed.destroy_process_group() "
            "before, or shard the module over that group yourself and trace it"
        )
    begin_group(dist.init_process_group, world, rank)
    running.append(sizes)
    try:
        with replicas_on_meta():
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            _devices.append(mesh)
            yield mesh
    except RuntimeError as error:
        if "FSDP needs a non-CPU accelerator" not in str(error):
            raise
        raise RequestError(
            f"FullyShardedDataParallel (FSDP1) on the mesh {shown(sizes)}: it is traced only in a "
            "script (rooftrace run torchrun ... train.py); shard with fully_shard (FSDP2) instead"
        ) from error
    except KeyError as error:
        if "mesh_dim_name" not in str(error):
            raise
        raise RequestError(f"the mesh {shown(sizes)}: {error.args[0]}") from error
    finally:
        running.remove(sizes)
        _devices.clear()
        axes.clear()
        forget_meshes()
        if dist.is_initialized():
            dist.destroy_process_group()


def _world(sizes: Mapping[str, int], rank: int) -> int:
    """How many processes a mesh has."""
    if not isinstance(sizes, Mapping):
        raise RequestError(f"a mesh {sizes!r:.80}: expected sizes by axis, as in {{'dp': 4}}")
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise RequestError(
                f"mesh axis {axis!r} has size {size!r}: expected a whole number of at least 1"
            )
    if not sizes:
        raise RequestError("a mesh without axes: name some, as in {'dp': 4, 'tp': 8}")
    world = math.prod(sizes.values())
    if not isinstance(rank, int) or not 0 <= rank < world:
        raise RequestError(
            f"rank {rank!r} of a mesh {shown(sizes)}: expected a rank from 0 to {world - 1}"
        )
    return world


def shown(sizes: Mapping[str, int]) -> str:
    """A mesh in a message: "dp=4,tp=8"."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())
