"""Kernel times of steps that others traced with torch.profiler, on any chip, predicted.

    python benchmarks/accuracy/traces.py FOLDER [--points FILE.csv]

FOLDER/traces has the traces (*.json.gz, of TraceLens, MIT), and targets.py, whose functions build
modules: a trace is of the function whose name is in its file's name.  The chip is that of the
trace, the sizes of inputs are those of its first op.  What the traces show of their own ops is
built here: ViT and Qwen without a head, Qwen with heads copied apart before attention and without a
cache, as transformers did then.  Steps of inference engines are of published models, with the
requests that the engine wrote into the name of the step.  Each trace is predicted without a fit;
those with a module also with numbers fitted to the kernels of each other one on that chip.
"""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from points import Point, parser_of, write_points

import rooftrace as rt
from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.diffs.runs.rundiff import is_communication
from rooftrace.errors import ProfileError
from rooftrace.hardware.chipfile.reading import chips_called
from rooftrace.measured.alignment.compiled import kernel_family
from rooftrace.measured.fit.fitting import FEW
from rooftrace.measured.profiles import Trace, read_trace

# -- modules ---------------------------------------------------------------------------------------


def _vit(targets: Any) -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()).bfloat16().eval(), targets.vit()[1]


def _qwen(targets: Any) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def copied(module: Any, q: Any, k: Any, v: Any, *given: Any, **named: Any) -> Any:
        apart = (each.contiguous() for each in (q, k, v))
        return sdpa_attention_forward(module, *apart, *given, **named)

    AttentionInterface.register("copied_heads", copied)
    AttentionMaskInterface.register("copied_heads", sdpa_mask)
    model, inputs = targets.qwen()
    model.config.use_cache, model.config._attn_implementation = False, "copied_heads"
    return model.model, inputs


AS_THEY_RAN = {"vit": _vit, "qwen": _qwen}
ALSO_CALLED = {"nsfw_image_detection": "vit"}
FIRST = {"aten::embedding": 1, "aten::conv2d": 0}
"""The argument of the first op that is the input of the model."""


def module_of(path: Path, trace: Trace, targets: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The module that ran, with inputs of the sizes that it had; None for an unknown model."""
    words = next((name for word, name in ALSO_CALLED.items() if word in path.name), path.name)
    made = (name for name, value in vars(targets).items() if callable(value) and name[:1].islower())
    name = next((name for name in made if name in words.lower()), None)
    if name is None:
        return None
    build: Callable[[Any], Any] = AS_THEY_RAN.get(name, lambda all_: getattr(all_, name)())
    model, inputs = build(targets)
    for op in sorted(trace.ops, key=lambda op: op.start):
        if op.name in FIRST and op.inputs is not None:
            sizes = op.inputs.shapes[FIRST[op.name]]
            if len(inputs) == 1 and len(sizes) == inputs[0].dim():
                inputs = (torch.zeros(sizes, dtype=inputs[0].dtype),)
            break
    return model, inputs


# -- steps of inference engines --------------------------------------------------------------------

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256},
    "mistral": {"architectures": ["MistralForCausalLM"], "vocab_size": 32768},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936},
}
SIZES: tuple[tuple[Any, ...], ...] = (
    ("qwen3", "qwen3-0.6b", 28, 1024, 3072, 16, 8, 128),
    ("qwen3", "qwen3-1.7b", 28, 2048, 6144, 16, 8, 128),
    ("qwen3", "qwen3-4b", 36, 2560, 9728, 32, 8, 128),
    ("qwen3", "qwen3-8b", 36, 4096, 12288, 32, 8, 128),
    ("qwen3", "qwen3-14b", 40, 5120, 17408, 40, 8, 128),
    ("qwen3", "qwen3-32b", 64, 5120, 25600, 64, 8, 128),
    ("qwen2", "qwen2.5-7b", 28, 3584, 18944, 28, 4, 128),
    ("qwen2", "qwen2.5-32b", 64, 5120, 27648, 40, 8, 128),
    ("qwen2", "qwen2.5-72b", 80, 8192, 29568, 64, 8, 128),
    ("llama", "llama-3.2-1b", 16, 2048, 8192, 32, 8, 64),
    ("llama", "llama-3.2-3b", 28, 3072, 8192, 24, 8, 128),
    ("llama", "llama-3.1-8b", 32, 4096, 14336, 32, 8, 128),
    ("llama", "llama-3.1-70b", 80, 8192, 28672, 64, 8, 128),
    ("mistral", "mistral-7b", 32, 4096, 14336, 32, 8, 128),
)
"""Family, name, layers, hidden, inner, heads, key and value heads, and width of dense models that
engines serve, as in their published config.json."""
_WORD = r"[-_. ]?"


def published(
    family: str, layers: int, hidden: int, inner: int, heads: int, groups: int, width: int
) -> dict[str, Any]:
    """The config.json of a model of such sizes."""
    return {
        **FAMILIES[family], "model_type": family, "hidden_size": hidden, "head_dim": width,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }  # fmt: skip


def config_of(path: Path, trace: Trace, folder: Path) -> Mapping[str, Any] | None:
    """The config.json of a model: by the name of its trace, else by its vocabulary and layers; None
    for an unknown model, or one of several."""
    name = path.name.lower()
    for family, known, *sizes in SIZES:
        if re.search(known.replace("-", _WORD).replace(".1", r"([._][13])?"), name):
            return published(family, *sizes)
    for file in sorted(folder.glob("configs/*/config.json")):
        if file.parent.name.lower().rpartition("--")[2] in name:
            config: Mapping[str, Any] = json.loads(file.read_text())
            return config
    counted = Counter(
        kernel.name for kernel in trace.kernels if kernel_family(kernel.name) == "attention"
    )
    layers = max(counted.values(), default=0)
    seen = {size for inputs in trace.ops.call_inputs.items for size in _numbers(inputs.shapes)}
    fits_ = [
        (family, *sizes)
        for family, _, *sizes in SIZES
        if {FAMILIES[family]["vocab_size"], sizes[1]} <= seen and layers and not layers % sizes[0]
    ]
    return published(*fits_[0]) if len(fits_) == 1 else None


def _numbers(shapes: Any) -> Iterator[int]:
    for item in shapes:
        if isinstance(item, tuple):
            yield from _numbers(item)
        else:
            yield item


_PART = r"{0}_(?P<{0}>\d+)\((?:sq(?P<{0}q>\d+)sk(?P<{0}k>\d+)\w*|(?P<{0}t>\d+))\)"
REQUESTS = re.compile(rf"execute_\w*?{_PART.format('context')}_{_PART.format('generation')}")
"""How many requests are prefilled and decoded; of each kind, all queries and all keys, or only the
queries."""


@dataclass(frozen=True)
class EngineStep:
    """The requests of one step of an engine, and the seconds of its kernels."""

    prefilled: int
    decoded: int
    queries: int  # of the prefilled requests
    past: int  # keys of those before the step
    keys: int  # of the decoded requests
    seconds: float

    @property
    def name(self) -> str:
        """What runs: the tokens of prompts, and the requests and mean keys of decode."""
        prompts = f"prefill {self.queries} tokens" if self.prefilled else ""
        decoding = f"decode {self.decoded} x {self.keys // max(self.decoded, 1)}"
        return " + ".join(filter(None, (prompts, decoding if self.decoded else "")))


def engine_step(trace: Trace) -> EngineStep | None:
    """The step of median seconds that names its requests; None without any."""
    steps = []
    for mark in trace.annotations:
        found = REQUESTS.match(mark.name)
        if found is None or trace.cut is None:
            continue
        step = trace.cut(mark.name, mark.start, mark.end)
        seconds = sum(trace.kernels.duration[index] for index in step.kernels)
        of = {name: int(number or 0) for name, number in found.groupdict().items()}
        queries = of["contextq"] or of["contextt"]
        past = max(of["contextk"] - queries, 0)
        if seconds:
            numbers = of["context"], of["generation"], queries, past, of["generationk"]
            steps.append(EngineStep(*numbers, seconds))
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2] if steps else None


def engine_of(path: Path) -> str:
    """The engine in the name of a trace."""
    return next((name for name in ("vllm", "sglang", "trtllm") if name in path.name), "vllm")


def served(step: EngineStep, config: Mapping[str, Any], chip: str, path: Path) -> Any:
    """The estimate of such a step: its requests are alike, as the engine says but their sums."""
    how = replace(rt.tools.execution_model("serving"), library=engine_of(path))
    prompts, decoded = step.prefilled, step.decoded
    requests: dict[str, Any] = {"phase": "decode", "batch": decoded}
    if prompts:
        cached = [step.past // prompts] * prompts + [step.keys // max(decoded, 1) - 1] * decoded
        new = [step.queries // prompts] * prompts + [1] * decoded
        requests = {"cached": cached, "new": new}
    else:
        requests["kv"] = step.keys // decoded
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.json"
        file.write_text(json.dumps(config))
        return rt.estimate(str(file), chip=chip, execution=how, **requests)


# -- traces ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """A trace, the graph of what ran, and how it ran."""

    name: str
    path: Path
    chip: str
    graph: rt.types.OpGraph
    how: ExecutionModel


@dataclass(frozen=True)
class Kernels:
    """Kernel times of a step.  seconds: of all kernels, measured and predicted; each: of the
    groups of equal kernels that are on both sides, by module pattern."""

    measured: float
    predicted: float
    each: list[Point]
    estimate: Any = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


IN_KERNELS = (("ISA942", "mi300x"), ("ISA950", "mi355x"), ("sm90", "h100-sxm"))
"""Instructions in the names of kernels, and the usual chip that has them."""


def chip_of(path: Path, trace: Trace) -> str | None:
    """The chip of a trace: as its driver names it, as its file does, by its kernels; or None."""
    named = map(chips_called, (*trace.devices.values(), *re.split(r"[-_.]", path.name)))
    kernels = " ".join(trace.kernels.names.items)
    by_kernel = ((chip,) for word, chip in IN_KERNELS if word in kernels)
    return next((chips[0] for chips in (*named, *by_kernel) if chips), None)


def execution_of(trace: Trace) -> ExecutionModel:
    """Eager, with FlashAttention 2 where PyTorch took it: it did on Hopper before 2.11."""
    flash2 = any("pytorch_flash" in name for name in trace.kernels.names.items)
    return rt.tools.execution_model("eager", attention_library="flash2" if flash2 else None)


def kernels(one: Traced, how: ExecutionModel) -> Kernels:
    """Its kernels as they were measured and as `how` predicts them."""
    made = rt.validate(one.path, chip=one.chip, target=one.graph, execution=how)
    step = made.steps[0]
    if step.device is None or step.device_predicted is None:
        raise SystemExit(f"{one.path.name}: no kernels in it")
    each = [
        Point(f"{one.name}: {_label(check)}", check.node.predicted, seconds, one.name)
        for check in made.nodes
        if (seconds := check.node.measured)
    ]
    estimate = rt.estimate(one.graph, chip=one.chip, execution=how)
    return Kernels(step.device, step.device_predicted, each, estimate)


def _label(check: Any) -> str:
    row = check.node.row
    return f"{row.name} of {row.module}"


def total(name: str, of: Kernels) -> Point:
    """The kernels of a step as a point: where they are, and their trace; no host is in the sum."""
    return Point(name, of.predicted, of.measured, "steps").of(name, of.estimate.times.cell)


def line(name: str, chip: str, fitted: str, found: Kernels) -> str:
    numbers = (
        f"| {name} | {chip} | {fitted} | {found.measured * 1e3:.3g} | {found.predicted * 1e3:.3g} "
        f"| {found.error:+.1%} | {len(found.each)} |"
    )
    if not found.each:
        return f"{numbers} | | | |"
    off = [abs(p.predicted / p.measured - 1) for p in found.each]
    worst = max(found.each, key=lambda p: abs(p.predicted - p.measured))
    return (
        f"{numbers} {statistics.fmean(off):.1%} "
        f"| {statistics.median(off):.1%} | {np.quantile(off, 0.9):.1%} "
        f"| {worst.label.partition(': ')[2]} {worst.predicted / worst.measured - 1:+.0%} |"
    )


HEAD = (
    "| trace | chip | fitted to | measured [ms] | predicted [ms] | error | kernels | mean | median "
    "| p90 | most seconds off |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|"
)


def main() -> None:
    given = parser_of(__doc__).parse_args()
    warnings.filterwarnings("ignore")
    folder = given.folder / "traces"
    if not (folder / "targets.py").exists():
        raise SystemExit(f"{folder}: no targets.py in it")
    place = importlib.util.spec_from_file_location("targets", folder / "targets.py")
    assert place is not None and place.loader is not None
    targets = importlib.util.module_from_spec(place)
    place.loader.exec_module(targets)
    points: list[Point] = []
    sums: dict[str, list[float]] = {}
    left_out: list[str] = []
    found: list[tuple[Traced, Kernels]] = []
    print(HEAD)
    for path in sorted(folder.glob("*.json.gz")) + sorted(folder.glob("*.json")):
        short = path.name.partition(".json")[0]
        try:
            trace = read_trace(path)
        except ProfileError as problem:
            left_out.append(f"{short}: {problem}")
            continue
        chip, step = chip_of(path, trace), engine_step(trace)
        if chip is None:
            left_out.append(f"{short}: its chip is unknown ({', '.join(trace.devices.values())})")
            continue
        if step is not None:
            config = config_of(path, trace, given.folder)
            if config is None or (step.decoded and not step.keys):
                lacks = "keys of its requests are" if config else "model is"
                left_out.append(f"{short}: the {lacks} unknown ({step.name})")
                continue
            if any(map(is_communication, trace.kernels.names.items)):
                left_out.append(f"{short}: it runs on several GPUs, of which the trace is one")
                continue
            estimate = served(step, config, chip, path)
            seconds = sum(row.timing.t_device for row in estimate.rows)
            name, here = f"{short}: {step.name}", Kernels(step.seconds, seconds, [], estimate)
        else:
            built = module_of(path, trace, targets)
            if built is None:
                left_out.append(f"{short}: no function of targets.py is of its model")
                continue
            name = short
            one = Traced(name, path, chip, rt.trace(built[0], *built[1]), execution_of(trace))
            try:
                here = kernels(one, one.how)
            except ValueError as problem:
                left_out.append(f"{short}: {str(problem)[:200]}")
                continue
            found.append((one, here))
        print(line(name, chip, "nothing", here), flush=True)
        sums.setdefault(f"nothing, {chip}", []).append(here.error)
        points += [total(name, here), *here.each]
    for kind, error, row in fits(found):
        sums.setdefault(kind, []).append(error)
        if row:
            print(row, flush=True)
    print("\n| chip, and what is fitted to another trace | totals | mean | median | worst | bias |")
    print("|---|---:|---:|---:|---:|---:|")
    for kind, off in sums.items():
        sizes = [abs(e) for e in off]
        print(
            f"| {kind} | {len(off)} | {statistics.fmean(sizes):.1%} "
            f"| {statistics.median(sizes):.1%} | {max(sizes):.1%} | {statistics.fmean(off):+.1%} |"
        )
    if left_out:
        print("\nLeft out:\n" + "\n".join(f"- {words}" for words in left_out))
    if given.points:
        write_points(given.points, points)


def fits(found: list[tuple[Traced, Kernels]]) -> Iterator[tuple[str, float, str]]:
    """For pairs of traces on one chip: how a fit to one predicts the other; with a line."""
    for seen, before in found:
        others = [(one, was) for one, was in found if one is not seen and one.chip == seen.chip]
        if not others:
            continue
        for kind, free in (("two numbers", FEW), ("as chosen", None)):
            print(f"{kind} from {seen.name}", file=sys.stderr)
            fitted = rt.calibrate(
                seen.path, seen.chip, seen.how, seen.graph, free=free, factors=False
            )
            for one, _ in others:
                after = kernels(one, replace(one.how, knobs=fitted.knobs))
                row = line(one.name, one.chip, f"{kind}, {seen.name}", after)
                yield f"{kind}, {one.chip}", after.error, row
        for one, was in others:
            factor = before.measured / before.predicted
            yield f"one factor, {one.chip}", was.predicted * factor / was.measured - 1, ""


if __name__ == "__main__":
    main()
