"""Execution models, which turn an op graph into kernels, and names of rewrites."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rooftrace._plain import Plain
from rooftrace.costmodels.kernels import Knobs, load_knobs
from rooftrace.costmodels.ops import WEIGHTS, ByteFactors
from rooftrace.errors import Worded, one_of
from rooftrace.hardware import Chip, load_chip
from rooftrace.hardware.chip import USUAL

KERNELS: tuple[str, ...] = (
    "written-attention",
    "shared-heads",
    "mask-numbers",
    "causal-conv1d",
    "selective-scan",
    "ssd",
    "gated-delta-rule",
    "linear-attention",
    "fused-routing",
    "fused-experts",
    "index-scores",
)
"""Rewrites that replace the written-out fallback of a library by its kernel."""

REWRITES = (
    "routed-experts",  # before the kernels, which run its ops
    *KERNELS,
    "absorb-latent",
    "fused-qkv",
    "fused-gate-up",
    "narrow-operands",
    "last-logits",
    "static-cache",
)
"""Names of rewrites of the graph, in the order in which they are applied."""


# -- executions ------------------------------------------------------------------------------------

ATTENTION = ("flash", "materialised")
SDPA = "sdpa"
LIBRARIES: Mapping[str, str] = {
    "torch": SDPA, "vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm",
}  # fmt: skip
"""Whose kernels run: PyTorch's, or those of an inference engine.  The values say whose attention
that is, among ATTENTION_LIBRARIES."""
ATTENTION_LIBRARIES = (
    *LIBRARIES.values(), "flash2", "flash3", "cudnn", "flashinfer", "triton", "flashmla",
)  # fmt: skip
"""Whose attention kernels run.  Those of PyTorch's `scaled_dot_product_attention` and of engines
depend on the chip, and on whether attention is on latents."""
FUSION = ("none", "detected", "factor")
DISPATCH = ("eager", "compiled", "graph", "mixed")
KV_APPEND = ("as-run", "in-place")
EXCHANGE = ("as-run", "deepep", "deepep-low-latency")
TYPICAL = "typical"
"""The knobs that are typical of the chip's kind and the execution."""


class ExecutionError(ValueError, Worded):
    """An execution model that contradicts itself, or a preset that does not exist."""


@dataclass(frozen=True, slots=True)
class WeightResidency:
    """Weight bytes are divided by these (the seed's WRF).  1: every weight crosses HBM once a use.

    Above 1 the model promises fewer bytes than the weights have; estimates below the compulsory
    bytes say so.
    """

    attention: float = 1.0
    dense: float = 1.0
    moe: float = 1.0

    def of(self, family: str) -> float:
        """The factor of an op family; families other than attention and moe are dense."""
        return {"attention": self.attention, "moe": self.moe}.get(family, self.dense)


@dataclass(frozen=True, slots=True)
class Utilization:
    """Engines below their peak; None leaves an engine at its peak."""

    b_sat: float | None = None  # rows at which products reach it: eta_tc = min(1, M_eff / b_sat)
    eta_scalar: float | None = None  # rate of vector work over the headline matrix peak
    tiles: bool = True  # whether products are padded to tiles and waves (kernels.tiles)

    def eta(self, rows: float | None) -> float:
        """Share of the matrix peak that a product with this many rows reaches."""
        if self.b_sat is None or rows is None:
            return 1.0
        return min(1.0, max(rows, 1) / self.b_sat)


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Slowdowns of a step of many processes, as what-ifs; none by default."""

    interference: float = 0.0  # share by which computing slows during an exchange
    # How far chips are apart for the same work, as standard deviation over mean: all wait for the
    # slowest of them.
    stragglers: float = 0.0
    expert_imbalance: float = 1.0  # tokens of the busiest process of experts, over the mean

    def __post_init__(self) -> None:
        for name in ("interference", "stragglers", "expert_imbalance"):
            value, least = getattr(self, name), 1 if name == "expert_imbalance" else 0
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not least <= value < math.inf:
                raise ExecutionError(
                    f"disturbances.{name}={value!r}: expected a number of at least {least}"
                )

    @property
    def asked(self) -> dict[str, float]:
        """Disturbances other than the default, by name."""
        plain = Disturbances()
        values = asdict(self)
        return {name: value for name, value in values.items() if value != getattr(plain, name)}


@dataclass(frozen=True, slots=True)
class ExecutionModel(Plain):
    """The way in which a step is run; validates itself."""

    name: str = "custom"
    attention: str = "flash"  # one kernel; or "materialised": the score matrix goes through HBM
    library: str = "torch"  # whose products, kernels of experts and attention run: of LIBRARIES
    attention_library: str | None = None  # whose attention: of ATTENTION_LIBRARIES; None: library's
    fusion: str = "none"  # "detected": groups of the graph; "factor": by the two factors below
    # The host enqueues every op; "compiled": every group; "graph": all; "mixed": groups of the
    # script's compiled code, and ops outside of it.
    dispatch: str = "eager"
    kv_append: str = "as-run"  # a `cat` reads L rows, writes L + 1; "in-place": the new rows only
    rewrites: tuple[str, ...] = ()  # names in REWRITES
    exchange: str = "as-run"  # rows go to experts as the module sends them; or by DeepEP's kernels
    weight_residency: WeightResidency = field(default_factory=WeightResidency)
    activation_fusion: float = 1.0  # factor on activation bytes
    elementwise: float = 1.0  # factor on temporary bytes
    utilization: Utilization = field(default_factory=Utilization)
    disturbances: Disturbances = field(default_factory=Disturbances)  # of steps of many processes
    tf32: bool = False  # whether fp32 matrix products run on the matrix engine
    beside: bool = True  # whether ops launch the helper kernels of CUDA's libraries
    # Constants of real kernels, in place of `utilization`.  "typical": those of the chip's kind,
    # unless `utilization` is set.  None: the peaks of the datasheet.
    knobs: Knobs | str | None = TYPICAL

    def __post_init__(self) -> None:
        for name, allowed in (
            ("attention", ATTENTION),
            ("library", LIBRARIES),
            ("attention_library", (*ATTENTION_LIBRARIES, None)),
            ("fusion", FUSION),
            ("dispatch", DISPATCH),
            ("kv_append", KV_APPEND),
            ("exchange", EXCHANGE),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ExecutionError(f"{name}={value!r}: {one_of(value, filter(None, allowed))}")
        if isinstance(self.knobs, str) and self.knobs != TYPICAL:
            raise ExecutionError(
                f"knobs={self.knobs!r:.60}: expected Knobs, None, or {TYPICAL!r}; "
                "execution_model(name, knobs=...) reads files"
            )
        self._check_rewrites()
        for name in ("activation_fusion", "elementwise"):
            value = getattr(self, name)
            if not _positive(value):
                raise ExecutionError(f"{name}={value!r}: expected a factor above 0")
            if value != 1 and self.fusion != "factor":
                raise ExecutionError(
                    f"{name}={value!r} with fusion={self.fusion!r}: the factors and detected "
                    "groups describe the same effect; use fusion='factor' or leave the factor at 1"
                )
        if not isinstance(self.beside, bool):
            raise ExecutionError(f"beside={self.beside!r}: expected true or false")
        if not isinstance(self.utilization.tiles, bool):
            raise ExecutionError(
                f"utilization.tiles={self.utilization.tiles!r}: expected true or false"
            )
        for owner in ("weight_residency", "utilization"):
            for name, value in asdict(getattr(self, owner)).items():
                if name == "tiles":
                    continue
                optional = owner == "utilization"
                if not _positive(value) and not (optional and value is None):
                    raise ExecutionError(
                        f"{owner}.{name}={value!r}: expected a number above 0"
                        f"{', or None' if optional else ''}"
                    )

    @property
    def traffic(self) -> ByteFactors | None:
        """The measured factors on bytes that hold for this execution; None without any.

        They hold where kernels are formed as in the run that was measured.
        """
        if not isinstance(self.knobs, Knobs) or self.knobs.traffic is None:
            return None
        holds = self.knobs.traffic.fusion == self.fusion and self.attention == "flash"
        return self.knobs.traffic if holds else None

    @property
    def attention_kernels(self) -> str:
        """Whose attention kernels run: `attention_library`, else those of `library`."""
        return self.attention_library or LIBRARIES[self.library]

    @property
    def untimed(self) -> ExecutionModel:
        """This execution without what only times depend on: its plans are the same."""
        knobs = self.knobs if self.traffic is not None else None
        return replace(self, knobs=knobs, utilization=Utilization(), tf32=False)

    @property
    def outside(self) -> ExecutionModel:
        """The execution of ops that are not compiled: of a mixed step, eager."""
        return replace(self, fusion="none", dispatch="eager") if self.dispatch == "mixed" else self

    @property
    def as_called(self) -> ExecutionModel:
        """This execution without helper kernels of ops, so that its ops are those of the graph: for
        measurements op by op."""
        return replace(self, beside=False) if self.beside else self

    @property
    def by_rules(self) -> ExecutionModel:
        """This execution with bytes as rules count them: without measured factors."""
        if not isinstance(self.knobs, Knobs) or self.knobs.traffic is None:
            return self
        return replace(self, knobs=replace(self.knobs, traffic=None))

    def refitted(self, traffic: ByteFactors) -> ExecutionModel:
        """This model of the seed's kind with measured factors in place of its constants.

        Weights, activations and temporaries take the measured bytes over those of the unfused
        graph, or the bytes of the kernels that ran by rule, or else keep their constant.
        """
        measured = traffic.identified

        def over_unfused(kind: str, constant: float) -> float:
            return max(traffic.unfused(kind), 1e-6) if kind in traffic.factors else constant

        return replace(
            self,
            weight_residency=WeightResidency(
                **{
                    name: 1 / over_unfused(kind, 1.0)
                    if kind in measured
                    else self.weight_residency.of(name)
                    for name, kind in WEIGHTS.items()
                }
            ),
            activation_fusion=over_unfused("activations", self.activation_fusion),
            elementwise=over_unfused("temporary", self.elementwise),
        )

    @property
    def factors_changed(self) -> dict[str, Any]:
        """Fields on bytes and rates that differ from the preset of this name, by dotted name:
        {"weight_residency.moe": 2}; empty for a model without a preset."""
        preset = PRESETS.get(self.name)
        if preset is None:
            return {}
        named = ("attention", "attention_library", "library", "fusion", "dispatch", "kv_append",
                 "activation_fusion", "elementwise")  # fmt: skip
        changed = {
            name: getattr(self, name)
            for name in named
            if getattr(self, name) != getattr(preset, name)
        }
        for owner in ("weight_residency", "utilization"):
            before = asdict(getattr(preset, owner))
            after = asdict(getattr(self, owner))
            changed |= {f"{owner}.{n}": value for n, value in after.items() if value != before[n]}
        return changed

    def knobs_on(self, chip: Chip) -> Knobs | None:
        """The constants for times on this chip; None for those of datasheets."""
        if not isinstance(self.knobs, str):
            return self.knobs
        if self.utilization != Utilization():
            return None
        return Knobs.typical(chip, compiled=self.fusion != "none")

    def borrowed_on(self, chip: Chip) -> str:
        """A sentence that times on this chip have constants of other chips; "" where not."""
        knobs = self.knobs_on(chip)
        return knobs.borrowed(chip) if knobs is not None else ""

    @staticmethod
    def chip_of(chip: str | Chip | None, models: Iterable[ExecutionModel]) -> Chip:
        """The chip to price on: this one; for None that of a fit, else h200-sxm.

        Raises UnknownChipError, and ExecutionError for fits of several chips, and of a chip that
        does not come along.
        """
        if chip is not None:
            return load_chip(chip)
        fits = {
            model.knobs.fitted_on[0]: model.knobs.title
            for model in models
            if isinstance(model.knobs, Knobs) and model.knobs.is_fit
        }
        if not fits:
            return load_chip(USUAL)
        if len(fits) > 1:
            raise ExecutionError(
                f"the knobs were fitted on {' and on '.join(fits)}: say chip= (--chip)"
            )
        ((name, title),) = fits.items()
        try:
            return load_chip(name)
        except (ValueError, LookupError):
            raise ExecutionError(
                f'{title} was fitted on "{name}", which is no chip that comes with rooftrace: '
                "say chip= (--chip), as the path of its file (rooftrace measure --chip-only)"
            ) from None

    def _check_rewrites(self) -> None:
        names = self.rewrites
        listed = isinstance(names, (tuple, list))
        if not listed or not all(isinstance(name, str) for name in names):
            raise ExecutionError(
                f"rewrites={names!r}: expected a tuple of names, for example ('last-logits',)"
            )
        for name in names:
            if name not in REWRITES:
                raise ExecutionError(f"rewrite {name!r}: {one_of(name, REWRITES)}")
        object.__setattr__(self, "rewrites", tuple(name for name in REWRITES if name in names))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ExecutionModel:
        """The inverse of `to_dict`.  Raises ExecutionError naming an unknown knob."""
        values = _with_parts(_checked(ExecutionModel, data))
        if isinstance(values.get("knobs"), Mapping):
            values["knobs"] = Knobs.from_dict(values["knobs"])
        return ExecutionModel(**values)


_PARTS: Mapping[str, type] = {
    "weight_residency": WeightResidency,
    "utilization": Utilization,
    "disturbances": Disturbances,
}
"""Fields that are records."""


def _with_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an execution model, with a record for each mapping that stands for one."""
    return {
        name: _PARTS[name](**_checked(_PARTS[name], value, f"{name}."))
        if name in _PARTS and isinstance(value, Mapping)
        else value
        for name, value in values.items()
    }


def _inside(
    model: ExecutionModel, changes: Mapping[str, Any], inner: Mapping[str, Any]
) -> dict[str, Any]:
    """Records of a model, or of its changes, with single fields changed by dotted names."""
    made: dict[str, Any] = {}
    for dotted, value in inner.items():
        owner, _, name = dotted.partition(".")
        if owner not in _PARTS:
            records = ", ".join(f"{record}." for record in _PARTS)
            raise ExecutionError(f"{dotted!r} is no execution knob; with a dot there are {records}")
        changed = _checked(_PARTS[owner], {name: value}, f"{owner}.")
        made[owner] = replace(made.get(owner, changes.get(owner, getattr(model, owner))), **changed)
    return made


def _positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _checked(kind: type, data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    names = sorted(f.name for f in fields(kind))
    for key in data:
        if key not in names:
            raise ExecutionError(
                f"{prefix + key!r} is no execution knob; the knobs are {', '.join(names)}"
            )
    return dict(data)


_SEED = Utilization(b_sat=64, eta_scalar=0.35, tiles=False)

PRESETS: Mapping[str, ExecutionModel] = {
    preset.name: preset
    for preset in (
        ExecutionModel("naive", attention="materialised"),
        ExecutionModel("eager"),
        ExecutionModel("compiled", fusion="detected", dispatch="compiled", kv_append="in-place"),
        ExecutionModel("mixed", fusion="detected", dispatch="mixed"),
        ExecutionModel(
            "efficient",
            fusion="detected",
            dispatch="graph",
            kv_append="in-place",
            rewrites=KERNELS,
        ),
        ExecutionModel(
            "serving",
            library="vllm",
            fusion="detected",
            dispatch="graph",
            kv_append="in-place",
            rewrites=REWRITES,
        ),
        ExecutionModel("seed-naive", attention="materialised", utilization=_SEED, knobs=None),
        ExecutionModel(
            "seed-efficient",
            fusion="factor",
            dispatch="graph",
            kv_append="in-place",
            weight_residency=WeightResidency(4.0, 4.0, 2.0),
            activation_fusion=0.5,
            elementwise=0.7,
            utilization=_SEED,
            knobs=None,
        ),
    )
}

SUMMARIES: Mapping[str, str] = {
    "naive": "attention scores through HBM, no fusion, one host dispatch per op",
    "eager": "ops as captured, SDPA one kernel, no fusion, one host dispatch per op",
    "compiled": "fusion groups detected in the graph, one host dispatch per group",
    "mixed": "compiled within what the script compiles itself, eager outside of that",
    "efficient": "as compiled, launched as one graph, with the kernels of libraries where a module "
    "writes them out",
    "serving": "as efficient, rewritten as servers do: absorbed latents, routed experts only, "
    "fused qkv and gate-up, logits of the last position",
    "seed-naive": "as naive, with the seed's utilization (B_sat 64, eta_scalar 0.35)",
    "seed-efficient": "the seed's factors: WRF 4/4/2, activation fusion 0.5, elementwise 0.7",
}


def execution_model(name: str | ExecutionModel, **changes: Any) -> ExecutionModel:
    """A preset by name (or a model as it is) with some fields changed.

    knobs may be the path of a knob file, a calibration, "typical" (those of the chip's kind) or
    "none"; disturbances and other records may be mappings.  A name with a dot changes one field of
    a record: {"weight_residency.moe": 2}.  A model with factors on bytes, such as seed-efficient,
    takes only measured factors from knobs, and keeps its rates.
    Raises ExecutionError for a preset or a knob that does not exist, and all that `load_knobs`
    raises.
    """
    inner = {name: changes.pop(name) for name in list(changes) if "." in name}
    changes = _with_parts(_checked(ExecutionModel, changes))
    if "knobs" in changes:
        changes["knobs"] = _read_knobs(changes["knobs"])
    if inner:
        start = name if isinstance(name, ExecutionModel) else execution_model(name)
        changes |= _inside(start, changes, inner)
    if isinstance(name, ExecutionModel):
        return _changed(name, changes)
    if not isinstance(name, str):
        raise ExecutionError(
            f"execution {name!r:.60}: expected one of {', '.join(PRESETS)}, or an ExecutionModel"
        )
    preset = PRESETS.get(name)
    if preset is None:
        raise ExecutionError(f"execution {name!r:.60}: {one_of(name, PRESETS)}")
    return _changed(preset, changes)


def _changed(model: ExecutionModel, changes: Mapping[str, Any]) -> ExecutionModel:
    """A model with changes; measured factors replace the factors of the model."""
    knobs = changes.get("knobs")
    if isinstance(knobs, Knobs) and knobs.traffic is not None and model.fusion == "factor":
        others = {name: value for name, value in changes.items() if name != "knobs"}
        return _changed(model, others).refitted(knobs.traffic)
    return replace(model, **changes) if changes else model


def _read_knobs(knobs: Any) -> Any:
    """Knobs by name or path, those of a calibration, or the value that was passed."""
    if not isinstance(knobs, (str, os.PathLike)):
        return getattr(knobs, "knobs", knobs)
    if knobs in (TYPICAL, "none"):
        return TYPICAL if knobs == TYPICAL else None
    return load_knobs(knobs)
