"""The results of one run of a phase, and the graph of that run."""

from __future__ import annotations

import contextlib
import functools
import platform
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from rooftrace.hardware.precisions import precision, storage_bytes
from rooftrace.tracer.asking import names
from rooftrace.tracer.dtypes import dtype_name
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.inputs import Inputs
from rooftrace.tracer.lower import lower, with_fallbacks, without_asides
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.releases import installed_release
from rooftrace.tracer.tape import META_KEY, Entry, Tape
from rooftrace.tracer.tensors import owners, subclasses, tensors_in, trees
from rooftrace.tracer.values import marks


@dataclass
class Step:
    """The results of one run of a phase: outputs, cache, gradients by storage, number of items.

    phase: the phase that ran, where only the run could tell it.
    """

    output: Any
    state: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[int, str] = field(default_factory=dict)
    items: int | None = None
    phase: str = ""
    optimizer: str | None = None  # the optimizers that stepped, where the phase does not say it


def graph_of(
    recorder: Recorder,
    phase: str,
    step: Step,
    module: nn.Module,
    inputs: Inputs,
    optimizer: str | None,
    target: str = "",
) -> OpGraph:
    """The OpGraph of what was recorded of one step of `module`."""
    kept = tensors_in({k: v for k, v in step.state.items() if k != "encoder_outputs"})
    for tensor in kept:
        recorder.node_of(tensor)  # also one that no op has read yet
    kv = {recorder.storage_of(tensor) for tensor in kept}
    items = inputs.items if step.items is None else step.items
    sizes = dict(inputs.workload)
    if phase not in names.phases() or not names.phase_of(phase).cached:
        sizes.pop("kv", None)  # no cache is there
    workload = {
        **sizes,
        "item": inputs.item,
        "items": _first_size((inputs.args, inputs.kwargs)) if items is None else items,
        "optimizer": optimizer,
    }
    release = recorder.scope.release
    if release != installed_release():
        workload["torch"] = str(release)
    outputs = [
        part for t in tensors_in(step.output) for part, _ in subclasses.parts_of(t, beside=False)
    ]
    graph = lower(
        recorder,
        _look_for_gaps(recorder, outputs, module),
        phase=phase,
        kv_storages={s for s in kv if s is not None},
        gradients=step.gradients,
        stored={name: form for name, _, form in declared_in(module)},
        assumptions=recorder.values.assumptions,
        model=describe(module),
        workload=workload,
        provenance=provenance(target),
        repeats=recorder.repeat_calls,
    )
    return with_fallbacks(without_asides(graph, recorder.values.asides))


def tell_freed(recorder: Recorder, gradients: Collection[int]) -> None:
    """Gradients last to the end of a step, but for those of which the code let go before its last
    op: their storages are freed there."""
    last, held = recorder.tags.last, recorder.tags.last_held
    early = {number for number in gradients if held.get(number, last) is not last}
    recorder.entries.standing.settle(early, [twin.nodes for twin in recorder.twins()])


def describe(module: nn.Module) -> dict[str, Any]:
    """Name, parameter counts, the model's own precision, bytes of parameters and buffers."""
    parameters = list(module.parameters())
    buffers = list(nn.Module.buffers(module))
    sizes: dict[str, int] = {}
    for parameter in parameters:
        if parameter.dtype.is_floating_point:
            name = dtype_name(parameter.dtype)
            sizes[name] = sizes.get(name, 0) + parameter.numel()
    config = owners.asked(module, "config")
    return {
        "name": getattr(config, "name_or_path", "") or type(module).__name__,
        "class": type(module).__name__,
        "params": sum(p.numel() for p in parameters),
        "params_trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": max(sizes, key=lambda n: sizes[n]) if sizes else "fp32",
        "bytes_parameters": subclasses.stored_bytes(parameters),
        "bytes_buffers": subclasses.stored_bytes(buffers),
        **as_stored(module),
    }


def declared_in(module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Parameters whose formats a checkpoint declares: name, tensor and format."""
    for path, part in module.named_modules():
        for name, form in marks.stored_in(part).items():
            tensor = part._parameters.get(name)
            if tensor is not None:
                yield owners.shown_path(f"{path}.{name}" if path else name), tensor, form


def as_stored(module: nn.Module) -> dict[str, Any]:
    """Bytes of all parameters in the formats that a checkpoint declares; the element of most.

    Nothing where it declares none.
    """
    stored = {id(tensor): form for _, tensor, form in declared_in(module)}
    if not stored:
        return {}
    total, elements = 0, Counter[str]()
    for parameter in module.parameters():
        size, form = subclasses.stored_bytes([parameter]), stored.get(id(parameter))
        if form is not None:
            count = size // parameter.element_size()
            elements[precision(form).element] += count
            size = storage_bytes(form, count)
        total += size
    return {"bytes_stored": total, "stored_as": elements.most_common(1)[0][0]}


def provenance(target: str) -> dict[str, Any]:
    """Versions of the software that made the graph."""
    return {"target": target, "versions": {**_versions()}, "python": platform.python_version()}


@functools.cache  # reading them took a quarter of the time of a small trace
def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("rooftrace", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _first_size(tree: Any) -> int:
    """The first dimension of the first tensor: the batch."""
    tensors = tensors_in(tree)
    return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1


# -- signs that a step did work unseen by the recorder ---------------------------------------------


def _look_for_gaps(tape: Tape, outputs: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
    """The outputs of a step that can be in the graph; assumptions record the signs of a gap.

    Signs are outputs that were computed on the host, and a step that reads no weight.
    """
    kept = []
    for tensor in outputs:
        if tensor.device.type != "cpu" or tape.tags.has(tensor):
            kept.append(tensor)
        elif tensor.is_floating_point():
            label = trees.label_of(tensor)
            tape.entries.unrecorded(f"the step returns a {label} that was computed on the host")
    nodes = tape.graph.nodes
    weights = [node for node in nodes if _is_parameter(node)]
    products = (getattr(node.target, "overloadpacket", None) for node in nodes)
    idle = weights and not any(node.users for node in weights)
    empty = not (outputs and all(_was_there(tape, tensor) for tensor in outputs))
    if idle and empty and not any(packet in flop_registry for packet in products):
        tape.entries.unrecorded(f"no recorded op reads any parameter of {type(module).__name__}")
    return kept


def _was_there(tape: Tape, tensor: Tensor) -> bool:
    """Whether a tensor is an input, a weight or a known value, which no op had to make."""
    return tape.entries.entry_of(tensor) is not None or tape.values.known(tensor) is not None


def _is_parameter(node: fx.Node) -> bool:
    entry = node.meta.get(META_KEY)
    return isinstance(entry, Entry) and entry.kind == "parameter"
