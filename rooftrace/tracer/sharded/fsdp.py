"""Modules that `fully_shard` has sharded (FSDP2), run on the meta device.

They keep their own hooks, order of prefetches and streams.  What is replaced while they are
recorded is the device that they ask for, and the check that refuses weights on meta.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.patches import original_of, replaced
from rooftrace.tracer.sharded.streams import DeviceModule, Stream

_HOME = "torch.distributed.fsdp._fully_shard"
_META = torch.device("meta")


@contextlib.contextmanager
def fully_sharded(
    roots: Iterable[nn.Module],
    unsharded: Callable[[Tensor, Tensor], None],
    resized: Callable[[Any, int], None],
    lent: bool = True,
) -> Iterator[None]:
    """Inside, FSDP2 modules below these roots run on meta; nothing happens where there are none.

    unsharded: called with each tensor that holds a whole weight, and the shard that it stands for.
    resized: called with each storage that is freed or allocated again, and its new size in bytes.
    lent: whether the modules are on meta for the length of the block only.  Those of a script stay
    on the device that it sees, with what they know of its streams.
    """
    states = _states(roots)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_storages_watched(resized))
        if states or not lent:
            _watch_weights(undo, unsharded)
        if states and lent:
            _replace_functions(undo)
            for state in states:
                _lend(undo, state)
        yield


def _states(roots: Iterable[nn.Module]) -> list[Any]:
    """The FSDP2 states of modules, each once."""
    home = sys.modules.get(f"{_HOME}._fsdp_state")
    if home is None:
        return []
    states = (home._get_module_fsdp_state(m) for root in roots for m in root.modules())
    return list({id(state): state for state in states if state is not None}.values())


def is_real(root: nn.Module) -> bool:
    """Whether a module below this one was sharded with weights that are not on meta.

    Such a module cannot be copied to meta: its hooks know the original only.
    """
    weights = (p.sharded_param for s in _states([root]) for g in _groups(s) for p in g.fsdp_params)
    return any(not weight.is_meta for weight in weights)


def _modules(*names: str) -> Iterator[ModuleType]:
    for name in names:
        module = sys.modules.get(f"{_HOME}.{name}")
        if module is not None:
            yield module


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

    undo.enter_context(replaced(group, {"_validate_no_meta_params": lambda self: None}))
    undo.enter_context(replaced(context, {"lazy_init": lazy_init}))


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


_CONTAINERS = (list, dict, set)


def _kept(undo: contextlib.ExitStack, item: Any) -> None:
    """Give an object its attributes back at the end of the block, containers with what they had."""
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
    """Inside, what frees the bytes of a tensor that stays alive is seen."""
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
