"""Puts back whatever a traced call changes in the user's own objects.

A module whose tensors are all on meta is traced itself, not a copy, and with its own hooks.  After
the trace, attributes of its modules and of the objects that they and the hooks hold are restored.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.patches import contexts
from rooftrace.tracer.tensors import owners, subclasses, trees

_CONTAINERS = (dict, OrderedDict, defaultdict, set, list, deque)
_DEPTH = 6
"""How deep objects inside objects are looked into."""
_NOT_THEIRS = (Tensor, nn.Module, type, ModuleType, bytes, *trees.PLAIN)


@contextlib.contextmanager
def as_before(module: nn.Module, inputs: Any = None) -> Iterator[None]:
    """Restore attributes (training flags, caches of tables) and gradients at the end of the block.

    Objects and containers that modules and their hooks hold are restored too.  inputs: of a module
    that runs on its own tensors, and not on meta: then their content is restored as well, and that
    of the inputs, and the random numbers of the process.  Else only a tensor's identity is.
    """
    with contextlib.nullcontext() if inputs is None else _numbers_kept(module, inputs):
        state = _State()
        for part in module.modules():
            state.keep(part)
        # The mode of most is among their attributes, and is put back with these.
        others = (part for part in module.modules() if "training" not in vars(part))
        modes = [(part, part.training) for part in others if hasattr(part, "training")]
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training
            state.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextlib.contextmanager
def _numbers_kept(module: nn.Module, inputs: Any) -> Iterator[None]:
    """Restore what tensors of a module and its inputs hold: content, gradient, attributes.

    Inside none of them has a gradient.  Their content is kept on the host.
    """
    own = [t for part in module.modules() for t in owners.own_tensors(part)]
    own += [t for part in module.modules() for _, t in owners.beside_in(part)]
    tensors = list({id(t): t for t in (*own, *trees.tensors_in(inputs))}.values())
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    kept = [(piece, piece.to("cpu", copy=True)) for piece in pieces]
    leaves = [(t, t.grad) for t in tensors if t.is_leaf]
    marks = [(t, dict(t.__dict__)) for t in tensors]
    counted = tuple(t for t in tensors if type(t) in subclasses.ORDINARY and not t.is_inference())
    autograd: Any = torch.autograd
    preserved = autograd._unsafe_preserve_version_counter(counted)  # as the content is
    with preserved, contexts.draws_undone(devices=True):
        for leaf, _ in leaves:
            leaf.grad = None
        try:
            yield
        finally:
            with torch.inference_mode():  # in which such tensors of others may be written too
                for piece, content in kept:
                    piece.copy_(content)
            for leaf, gradient in leaves:
                leaf.grad = gradient
            for tensor, attributes in marks:
                _put_back(tensor.__dict__, attributes)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The real tensors that hold the content of one, each element once.

    Code that writes to them is not seen by autograd.
    """
    if isinstance(tensor, owners.LAZY):
        return
    for part, _ in subclasses.parts_of(tensor):
        for piece in trees.pieces_of(part):
            if not piece.is_meta:
                once = piece.data
                for place, stride in enumerate(piece.stride()):
                    once = once if stride else once.narrow(place, 0, min(1, once.shape[place]))
                yield once


class _State:
    """What objects hold: their attributes, the items of containers, the variables of functions."""

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}
        self._held: list[Any] = []  # identities stay those of these objects
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []

    def keep(self, part: nn.Module) -> None:
        """Remember a module's attributes, and what those hold."""
        self._attributes.append((vars(part), dict(vars(part))))
        for item in vars(part).values():
            self._look(item, _DEPTH)

    def restore(self) -> None:
        """Put back what was there."""
        for container, content in chain(self._attributes, self._containers):
            if container or content:  # most are empty, as the dicts of hooks
                _put_back(container, content)
        for cell, value in self._cells:
            if trees.cell_content(cell) is not value and value is not trees.ABSENT:
                cell.cell_contents = value

    def _look(self, item: Any, depth: int) -> None:
        if isinstance(item, _NOT_THEIRS) or self._depths.get(id(item), 0) >= depth:
            return
        new = id(item) not in self._depths
        self._depths[id(item)] = depth
        self._held.append(item)
        if type(item) in _CONTAINERS:
            if new:
                self._containers.append((item, type(item).copy(item)))
            inside = list(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, (tuple, frozenset)):
            inside = list(item)
        else:
            inside = self._of_object(item, new)
        for part in inside:
            self._look(part, depth - 1)

    def _of_object(self, item: Any, new: bool) -> list[Any]:
        if isinstance(item, MethodType):
            return [item.__self__, item.__func__]
        if isinstance(item, partial):
            return [item.func, *item.args, *item.keywords.values()]
        if isinstance(item, FunctionType):
            cells = item.__closure__ or ()
            if new:
                self._cells += [(cell, trees.cell_content(cell)) for cell in cells]
            return [*map(trees.cell_content, cells), *(item.__defaults__ or ())]
        if not _of_the_user(type(item)) or not isinstance(getattr(item, "__dict__", None), dict):
            return []
        if new:
            self._attributes.append((vars(item), dict(vars(item))))
        return list(vars(item).values())


def _of_the_user(kind: type) -> bool:
    """Whether a class is neither torch's nor Python's, whose objects other threads may use."""
    top = kind.__module__.partition(".")[0]
    return top not in ("torch", "rooftrace") and top not in sys.stdlib_module_names


def _put_back(container: Any, content: Any) -> None:
    """Give a container its old items back, if it has others now."""
    if _same(container, content):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def _same(container: Any, content: Any) -> bool:
    """Whether a container has the very items that it had."""
    if len(container) != len(content):
        return False
    if isinstance(container, set):
        return {*map(id, container)} == {*map(id, content)}
    alike = all(map(is_, container, content))
    if alike and isinstance(container, dict):
        return all(map(is_, container.values(), content.values()))
    return alike
