"""Attempts to run a phase under a recorder, checks before them, and their results as graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import platform
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from rooftrace.errors import RequestError, TraceError
from rooftrace.graph import OpGraph, assumptions
from rooftrace.hardware.precisions import precision, storage_bytes
from rooftrace.tracer import Options, names, torch_private, users_traceback
from rooftrace.tracer.inputs import Inputs
from rooftrace.tracer.lowering import NotAlikeError, lower, with_fallbacks, without_unused
from rooftrace.tracer.recording import META_KEY, Entry, Recorder, Tape, installed_release
from rooftrace.tracer.repeats import UnlikeLayersError
from rooftrace.tracer.sharding import fsdp
from rooftrace.tracer.values import (
    DECIDED,
    ChoiceNeededError,
    UnknownValueError,
    Values,
    dtype_name,
    masks,
    own_tensors,
    tensors_in,
    trees,
)

# -- refusals --------------------------------------------------------------------------------------

_DEEP = 64
"""A tree of modules of this depth may be why Python's stack of calls was too short."""
LIMIT_OF_C_IS_FIXED = sys.version_info[:2] == (3, 12)
"""Whether Python limits calls that pass through C by a number that nobody can change."""
_FRAMES = 20
"""Calls of Python on its stack for each module of a chain, at most: in a copy, and in a trace."""


def check_traceable(root: nn.Module, inputs: Sequence[Tensor] = ()) -> None:
    """Raise RequestError for fake tensors, and for real ones that `fully_shard` has sharded."""
    if fsdp.is_real(root):
        raise RequestError(
            f"{type(root).__name__} holds real weights that fully_shard has sharded, and cannot be "
            "copied: build it under `with torch.device('meta'):`, call fully_shard, pass that"
        )
    for module in trees.modules_in(root):
        if any(isinstance(tensor, torch_private.FakeTensor) for tensor in own_tensors(module)):
            path = next(path for path, part in root.named_modules() if part is module)
            where = f" (in {path!r:.80})" if path else ""
            raise RequestError(
                f"{type(module).__name__} has tensors of a FakeTensorMode{where}: build it "
                "under `with torch.device('meta'):`"
            )
    for tensor in inputs:
        if isinstance(tensor, torch_private.FakeTensor):
            raise RequestError(
                f"an input {list(tensor.shape)} is a tensor of a FakeTensorMode: pass "
                "`torch.empty(SHAPE, device='meta')`, or a real one"
            )


@contextlib.contextmanager
def depth_explained(root: Any) -> Iterator[None]:
    """Inside, a module too deep for Python's stack of calls raises a RequestError that says so."""
    try:
        yield
    except (RecursionError, TraceError) as error:
        causes: list[BaseException | None] = [error, error.__cause__, error.__context__]
        depth = _depth(root) if isinstance(root, nn.Module) else 0
        if depth < _DEEP or not any(isinstance(cause, RecursionError) for cause in causes):
            raise
    else:
        return
    limit = sys.getrecursionlimit()
    text = f"{type(root).__name__} has modules inside modules, {depth:,} deep"
    if LIMIT_OF_C_IS_FIXED:
        raise RequestError(
            f"{text}: more calls through C than Python 3.12 ever stacks; use another release of it"
        )
    raise RequestError(
        f"{text}: more calls than Python stacks ({limit:,}); call "
        f"sys.setrecursionlimit({max(depth * _FRAMES, 2 * limit)}) before"
    )


def _depth(root: nn.Module) -> int:
    """The length of the longest chain of modules inside modules."""
    depth, level, seen = 0, [root], {id(root)}
    while level:
        inner = [child for module in level for child in module._modules.values()]
        level = [child for child in inner if child is not None and id(child) not in seen]
        seen.update(map(id, level))
        depth += 1
    return depth


# -- results ---------------------------------------------------------------------------------------


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
    """The OpGraph of one recorded step of `module`."""
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
    inside = (trees.parts_of(t, attributes=False) for t in tensors_in(step.output))
    outputs = [part for parts in inside for part, _ in parts]
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
    return with_fallbacks(without_unused(graph, recorder.values.asides))


def tell_freed(recorder: Recorder, gradients: Collection[int]) -> None:
    """Gradients last to the end of a step, but for those of which the code let go before its last
    op: their storages are freed there."""
    last, held = recorder.tags.last, recorder.tags.last_held
    early = {number for number in gradients if held.get(number, last) is not last}
    recorder.entries.standing.settle(early, [twin.nodes for twin in recorder.twins()])


def describe(module: nn.Module) -> dict[str, Any]:
    """Name, parameter counts, the model's precision, bytes of parameters and buffers."""
    parameters = list(module.parameters())
    buffers = list(nn.Module.buffers(module))
    sizes: dict[str, int] = {}
    for parameter in parameters:
        if parameter.dtype.is_floating_point:
            name = dtype_name(parameter.dtype)
            sizes[name] = sizes.get(name, 0) + parameter.numel()
    config = trees.attribute(module, "config")
    return {
        "name": getattr(config, "name_or_path", "") or type(module).__name__,
        "class": type(module).__name__,
        "params": sum(p.numel() for p in parameters),
        "params_trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": max(sizes, key=lambda n: sizes[n]) if sizes else "fp32",
        "bytes_parameters": trees.stored_bytes(parameters),
        "bytes_buffers": trees.stored_bytes(buffers),
        **as_stored(module),
        **_configured(config),
    }


_MOST_SETTINGS, _LONGEST_SETTING = 80, 60
_NO_SETTINGS = ("name_or_path", "transformers_version")


def _configured(config: Any) -> dict[str, Any]:
    """The settings of a module's configuration that are numbers, switches or short texts.

    Of one of Hugging Face those that differ from what every model has; of a record or a mapping
    all.  Settings inside of settings have both names, with a dot between.
    """
    differing = getattr(config, "to_diff_dict", None)
    if callable(differing):
        config = None
        with contextlib.suppress(Exception):  # code of a model may compare with what it cannot make
            config = differing()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    settings = dict(_settings(config)) if isinstance(config, Mapping) else {}
    return {"config": dict(islice(settings.items(), _MOST_SETTINGS))} if settings else {}


def _settings(config: Mapping[Any, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{head}{key}"
        if isinstance(value, Mapping) and not head:
            yield from _settings(value, f"{name}.")
        elif str(key).startswith("_") or key in _NO_SETTINGS:
            continue
        elif isinstance(value, str):
            if 0 < len(value) <= _LONGEST_SETTING:
                yield name, value
        elif isinstance(value, (bool, int, float)) and math.isfinite(value):
            yield name, value


def declared_in(module: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Parameters whose formats a checkpoint declares: name, tensor and format."""
    parts = module.named_modules() if any(map(masks.stored_in, trees.modules_in(module))) else ()
    for path, part in parts:
        for name, form in masks.stored_in(part).items():
            tensor = part._parameters.get(name)
            if tensor is not None:
                yield trees.shown_path(f"{path}.{name}" if path else name), tensor, form


def as_stored(module: nn.Module) -> dict[str, Any]:
    """Bytes of all parameters in the formats that a checkpoint declares; the element of most.

    Nothing where it declares none.
    """
    stored = {id(tensor): form for _, tensor, form in declared_in(module)}
    if not stored:
        return {}
    total, elements = 0, Counter[str]()
    for parameter in module.parameters():
        size, form = trees.stored_bytes([parameter]), stored.get(id(parameter))
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
    """Whether a tensor is an input, a weight or a constant, which no op had to make."""
    return tape.entries.entry_of(tensor) is not None or tape.values.known(tensor) is not None


def _is_parameter(node: fx.Node) -> bool:
    entry = node.meta.get(META_KEY)
    return isinstance(entry, Entry) and entry.kind == "parameter"


# -- attempts --------------------------------------------------------------------------------------
# Attempts to run code under a recorder: unknown conditions are flipped until it runs.

MAX_BRANCH_RETRIES = 6
"""How many unknown conditions of one source line are turned one by one."""
MAX_LINES = 64
"""How many source lines may have their unknown conditions turned."""
UNKNOWN_NUMBERS = (1, 0)
"""Values tried in turn for an unknown number, until the code runs."""


class OwnBackwardError(RequestError):
    """Code calls backward itself in a phase that runs it without gradients."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} runs without gradients, and its code calls backward: trace its call as the "
            "step that it is, rooftrace.trace(lambda module, x: module(x), module, x), or a "
            "function without a phase"
        )


def attempted(
    run: Callable[[Recorder], OpGraph], options: Options, name: str, root: str
) -> OpGraph:
    """Call `run` under a recorder; after a failure, again with the last unknown condition flipped.

    A check of arguments stands in one line and may run many times, so all conditions of a line are
    flipped together first, then one by one; the last attempt takes unknown numbers as zero.
    name, root: a name for the code, and the class of its module, for the message of the TraceError.
    """
    first: TraceError | None = None
    repeats, follows_all = options.repeats, False
    apart: set[str] = set()  # paths of layers of which each is run, also under gradients
    for number in UNKNOWN_NUMBERS:
        turns = _Flips(options.branches)
        while True:
            values = Values(
                branches=turns.branches,
                assume=options.assume,
                number=number,
                turned=turns.lines,
            )
            values.by_number, values.follows_all = bool(options.branches), follows_all
            recorder = Recorder(
                values,
                roll_loops=repeats,
                repeat_calls=repeats,
                run_apart=apart,
                release=options.release,
            )
            try:
                graph = run(recorder)
                assumptions.check_histograms(options.assume, (a.facts for a in values.assumptions))
                return graph
            except RequestError:
                raise
            except ChoiceNeededError:
                follows_all = True
            except UnlikeLayersError as error:  # all of them, if a second one is not alike
                assert error.path not in apart
                apart = {*apart, "" if apart else error.path}
            except NotAlikeError as error:  # the skipped calls have to run after all
                assert repeats, error
                repeats = False
            except Exception as error:  # whatever a user's module may raise
                if recorder.here.wants_gradients:
                    raise OwnBackwardError(name) from error
                first = first or _explained(error, recorder, name, root)
                first.__cause__ = first.__cause__ or error
                if not turns.turn(values):
                    break
            finally:
                recorder.close()
                stopped = isinstance(sys.exc_info()[1], KeyboardInterrupt)  # who stops is not kept
                with contextlib.suppress(AttributeError):  # private attributes may go away
                    if not stopped:
                        recorder.forget()
        if "value" in options.assume or all(a.kind != "value" for a in values.assumptions):
            break
    assert first is not None
    raise first from first.__cause__


class _Flips:
    """The unknown conditions to flip, learnt from attempts that failed.

    lines: source lines, all conditions of each.  branches: single conditions, by their number.
    """

    def __init__(self, branches: Mapping[int, bool]) -> None:
        self.branches, self.lines = dict(branches), set[str]()
        self._first: dict[str, int] = {}  # the condition with which a line was turned
        self._single: Counter[str] = Counter()

    def turn(self, values: Values) -> bool:
        """Flip the last condition of an attempt that failed; False if nothing is left to try."""
        last, line = values.decisions - 1, values.last_line
        if last < 0 or values.decided or len(self._first) > MAX_LINES:
            return False
        if line and line not in self._first:
            self._first[line] = last
            self.lines.add(line)
            return True
        if line in self.lines:  # it fails either way
            self.lines.discard(line)
            last = self._first[line]
        if last in self.branches or self._single[line] == MAX_BRANCH_RETRIES:
            return False
        self._single[line] += 1
        self.branches[last] = True
        return True


def _explained(error: Exception, recorder: Recorder, name: str, root: str) -> TraceError:
    """A TraceError with the traceback, shortened to the user's code, and the module that failed."""
    path, kind = recorder.failed_in or ("", root)
    where = f"module {path!r} ({kind})" if path else f"module {kind}"
    failed = recorder.failed_op
    if failed is not None and failed[0] is error:
        where += f" at {failed[1]}"
    lines = [
        f"{name} failed in {where}: {type(error).__name__}: {error}",
        users_traceback(error),
    ]
    decided = [a for a in recorder.values.assumptions if a.kind in DECIDED]
    for item in list({(a.kind, a.where): a for a in decided}.values())[-3:]:
        choice = f"{item.kind}@{item.where}" if item.where else item.kind
        other = str(not item.value).lower() if item.kind == "branch" else "NUMBER"
        lines.append(f"{item.text}; --assume {choice}={other} takes it otherwise.")
    if isinstance(error, UnknownValueError):
        lines.append(
            "Its code needs a value that only real weights give; pass inputs that avoid that path."
        )
    else:
        lines.append(
            "If the module runs on real tensors of these shapes, this is a bug of rooftrace: keep "
            "the module, `pip freeze` and what --traceback prints.  Otherwise pass inputs that it "
            "accepts (in code, or with --input NAME=SHAPE:DTYPE)."
        )
    return TraceError("\n".join(line for line in lines if line))
