"""report.json: a report as a record of records; report.schema.json is made from their types.

Plain values in SI units; null is "not modelled".  Equal inputs give equal bytes.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, TypedDict

from rooftrace._plain import Plain, Share, keys_of
from rooftrace.costmodels.estimates import Estimate, Island, islands
from rooftrace.costmodels.fusion import SUMMARIES, Coverage, Unsupported
from rooftrace.graph import Assumption
from rooftrace.hardware import Chip
from rooftrace.reporting.renderers import view
from rooftrace.reporting.sections.builders import added_sections
from rooftrace.reporting.sections.heads import Piped, rows_of
from rooftrace.reporting.sections.memory import (
    PhaseExchange,
    Reached,
    exchanged,
    is_whole,
    meshed,
    reached,
)
from rooftrace.reporting.sections.results import Costs, PhaseMemory, PhaseStep, Results, Savings
from rooftrace.reporting.sections.trust import Routed, routed
from rooftrace.studies.advice import Guidance

SCHEMA = "rooftrace.report/1"
ABOUT = {
    "$id": "urn:rooftrace:report:1",
    "title": "rooftrace report",
    "description": "What the steps of a model cost. FLOP, byte, second and FLOP/byte, as numbers; "
    "null is: not modelled or not known.",
}


# -- how far to trust it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap(Plain):
    """An op without a rule in a phase."""

    phase: str
    op: Unsupported

    KEYS = (
        "phase target=op.target count=op.count bytes=op.bytes bytes_least=op.bytes_least "
        "bytes_most=op.most shapes=op.shapes modules=op.modules stub=op.stub"
    )


@dataclass(frozen=True)
class Covered(Plain):
    """The share of a step that rules cover."""

    of: Coverage

    KEYS = (
        "ops=of.ops ops_with_rule=of.ops_with_rule bytes_with_rule_share=of.bytes_with_rule_share"
    )


@dataclass(frozen=True)
class AllCovered(Plain):
    """Sums of the main execution over the phases; ops without a rule from every execution."""

    results: Results

    KEYS = "**main lower_bound unsupported phases"

    @property
    def main(self) -> Covered:
        """The sums."""
        main = [estimate.coverage for estimate in self.results.broken_down()]
        names = ("ops", "ops_with_rule", "bytes", "bytes_with_rule")
        sums = {name: sum(getattr(each, name) for each in main) for name in names}
        return Covered(Coverage(**sums, unsupported=()))

    @property
    def lower_bound(self) -> bool:
        """Whether something ran out of sight of the trace."""
        return bool(self.results.unrecorded)

    @property
    def unsupported(self) -> list[Gap]:
        """The ops without a rule."""
        return [Gap(phase, op) for phase, op in self.results.unsupported_ops()]

    @property
    def phases(self) -> Mapping[str, Mapping[str, Covered]]:
        """By phase, then execution."""
        r = self.results
        return {
            phase: {name: Covered(r.estimate(phase, name).coverage) for name in r.executions}
            for phase in r.phases
        }


@dataclass(frozen=True)
class Assumed(Plain):
    """An assumption of a phase."""

    phase: str
    item: Assumption
    time_share: Share  # of t_est in kernels that rest on it (main execution, first chip)

    KEYS = (
        "phase id=item.id kind=item.kind where=item.where text=item.text value=item.value "
        "op=item.op facts=item.facts? time_share"
    )


@dataclass(frozen=True)
class PhaseIsland(Plain):
    """Tensors that stay in another floating precision than the priced one, in a phase."""

    phase: str
    island: Island

    KEYS = "phase **island"


# -- the model and added sections ------------------------------------------------------------------


OF_A_MODEL = {"name": ["string", "null"], "params": ["integer", "null"]}
OF_A_MODEL["params_trainable"] = OF_A_MODEL["params"]
OF_A_WORKLOAD = ("batch", "seq", "kv", "dtype", "optimizer")
ModelFacts: TypeAlias = Annotated[
    Mapping[str, Any],
    ("properties", {key: {"type": types} for key, types in OF_A_MODEL.items()}),
    ("required", tuple(OF_A_MODEL)),
]
SharedWorkload: TypeAlias = Annotated[Mapping[str, Any], ("required", (*OF_A_WORKLOAD, "phases"))]
Execution: TypeAlias = Annotated[
    Mapping[str, Any], ("required", ("name", "attention", "fusion", "dispatch", "summary"))
]


class AddedTable(TypedDict):
    """A table of a section that was added."""

    units: Mapping[str, str]  # by column; empty where the values have none
    rows: list[Mapping[str, Any]]


@dataclass(frozen=True)
class AddedSection(Plain):
    """A section that was added: its tables by their keys, the raw values of their rows."""

    section: view.Section

    KEYS = "title=section.title tables notes"

    @property
    def tables(self) -> Mapping[str, AddedTable]:
        """Its tables."""
        tables = [part for part in self.section.parts if isinstance(part, view.Table)]
        return {
            table.key or str(number): {
                "units": {column.key: column.unit.symbol for column in table.columns},
                "rows": [{c.key: c.value(row) for c in table.columns} for row in table.rows],
            }
            for number, table in enumerate(tables)
        }

    @property
    def notes(self) -> list[str]:
        """Its sentences."""
        return [part.text for part in self.section.parts if isinstance(part, view.Note)]


class PhaseNote(TypedDict):
    """A sentence on a step."""

    phase: str
    execution: str
    text: str


@dataclass(frozen=True)
class Document(Plain):
    """A report as report.json has it."""

    of: Results

    schema = SCHEMA
    KEYS = (
        "schema model workload chips executions main_execution=of.main coverage assumptions "
        "routing? together? pipelines? communication? islands phases guidance "
        "headroom memory notes sections? provenance"
    )

    @property
    def model(self) -> ModelFacts:
        """The model."""
        return {**dict.fromkeys(OF_A_MODEL), **self.of.model}

    @property
    def workload(self) -> SharedWorkload:
        """The workload that all phases share; null where they differ."""
        phases = {phase: graph.workload for phase, graph in self.of.graphs.items()}
        return {**dict.fromkeys(OF_A_WORKLOAD), **self.of.workload, "phases": phases}

    @property
    def chips(self) -> Annotated[Mapping[str, Chip], ("minProperties", 1)]:
        """By name; the first is the one that the phases show."""
        return {chip.name: chip for chip in self.of.chips}

    @property
    def executions(self) -> Annotated[Mapping[str, Execution], ("minProperties", 1)]:
        """The knobs of each execution model."""
        first = self.of.phases[0]
        models = {name: self.of.estimate(first, name).execution for name in self.of.executions}
        return {
            name: {**model.to_dict(), "summary": SUMMARIES.get(name)}
            for name, model in models.items()
        }

    @property
    def coverage(self) -> AllCovered:
        """Sums over the phases of the main execution; unsupported ops of every execution."""
        return AllCovered(self.of)

    @property
    def assumptions(self) -> list[Assumed]:
        """Assumptions of the trace."""
        return [Assumed(p, a, self.of.resting_share(p, a.id)) for p, a in self.of.assumptions]

    @property
    def routing(self) -> list[Routed]:
        """Layers with experts, by phase; absent where there are none."""
        return routed(self.of)

    @property
    def together(self) -> list[Reached]:
        """Steps of several processes: rates of all together; absent for one process."""
        return [reached(step) for step in meshed(self.of) if is_whole(step)]

    @property
    def pipelines(self) -> list[Piped]:
        """Steps of pipelines, of which the phases are stages; absent without one."""
        return list(rows_of(self.of))

    @property
    def communication(self) -> list[PhaseExchange]:
        """Exchanges of a process, by axis and kind; absent where there are none."""
        return list(exchanged(self.of))

    @property
    def islands(self) -> list[PhaseIsland]:
        """Tensors that stay in another floating precision than the priced one."""
        graphs = self.of.graphs.items()
        return [PhaseIsland(phase, each) for phase, graph in graphs for each in islands(graph)]

    @property
    def phases(
        self,
    ) -> Annotated[
        Mapping[str, Annotated[Mapping[str, PhaseStep], ("minProperties", 1)]], ("minProperties", 1)
    ]:
        """By phase, then execution."""
        return {
            phase: {name: PhaseStep(by_chip) for name, by_chip in by_execution.items()}
            for phase, by_execution in self.of.estimates.items()
        }

    @property
    def guidance(self) -> Mapping[str, Guidance]:
        """By phase: changes that speed up the main execution on the first chip, each alone."""
        return self.of.guidance

    @property
    def headroom(self) -> Mapping[str, Savings]:
        """By phase: the savings of fusing, for the main execution on the first chip."""
        return {phase: Savings(headroom) for phase, headroom in self.of.headroom.items()}

    @property
    def memory(self) -> Mapping[str, PhaseMemory]:
        """By phase: the largest live bytes of each role, and of all together."""
        return {phase: PhaseMemory(self.of, phase) for phase in self.of.memory}

    @property
    def notes(self) -> list[PhaseNote]:
        """Sentences on rewrites and other facts of note."""
        return [
            {"phase": phase, "execution": execution, "text": note}
            for phase, execution, estimate in self.of.of_first_chip()
            for note in estimate.notes
        ]

    @property
    def sections(self) -> Annotated[Mapping[str, AddedSection], ("minProperties", 1)]:
        """Sections added to the report by the user or by another package."""
        return {key: AddedSection(section) for key, section in added_sections(self.of).items()}

    @property
    def provenance(self) -> Mapping[str, Mapping[str, Any]]:
        """The versions and settings that each graph was captured with."""
        return {phase: graph.provenance for phase, graph in self.of.graphs.items()}


def document(result: Results | Estimate) -> dict[str, Any]:
    """A report as report.json has it; a step as its phases, and their memory, have it."""
    if isinstance(result, Estimate):
        return {**Costs(result).to_dict(), "memory": result.memory.to_dict()}
    return Document(result).to_dict()


def report_schema() -> str:
    """The text of report.schema.json."""
    return json.dumps(schema_of(Document, ABOUT), indent=1, ensure_ascii=False) + "\n"


# -- schema ----------------------------------------------------------------------------------------
# The type of a key is that of its field or property, and its description the comment of the field,
# or the first sentence of the property's docstring.  Numbers are at least 0 unless `Annotated`.
#
#     schema_of(Saving, {})   # {"type": "object", "properties": {"kind": {"type": "string"}, ...


Schema = dict[str, Any]
_SIMPLE: Mapping[Any, Schema] = {
    Any: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number", "minimum": 0},
}


def schema_of(record: type[Plain], about: Mapping[str, str]) -> Schema:
    """The JSON schema of a document; about: its $id, title and description."""
    definitions: Schema = {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **about,
        **_object(_properties(record, record.KEYS, definitions)),
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(kind: Any, definitions: Schema) -> Schema:
    """The schema of a value of a type; `definitions` gets the records that it refers to."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return {**_schema(inside[0], definitions), **dict(inside[1:])}
    if origin is None and kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    if origin is typing.Literal:
        return {"enum": list(inside)} if len(inside) > 1 else {"const": inside[0]}
    if origin in (typing.Union, UnionType):
        (made,) = (_schema(each, definitions) for each in inside if each is not NoneType)
        if "type" in made:
            return {**made, "type": [made["type"], "null"]}
        return {"anyOf": [made, {"type": "null"}]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        items = _schema(inside[1], definitions)
        return {"type": "object", **({"additionalProperties": items} if items else {})}
    if isinstance(origin, type):  # a list or a tuple
        items = {"type": "array", "items": _schema(inside[0], definitions)}
        pair = origin is tuple and inside[-1] is not Ellipsis
        return {**items, "minItems": len(inside), "maxItems": len(inside)} if pair else items
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        keys = getattr(kind, "KEYS", "*")
        definitions[kind.__name__] = _object(_properties(kind, keys, definitions))
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _object(keys: Mapping[str, tuple[Schema, bool]]) -> Schema:
    return {
        "type": "object",
        "properties": {key: made for key, (made, _) in keys.items()},
        "required": [key for key, (_, optional) in keys.items() if not optional],
        "additionalProperties": False,
    }


def _properties(record: Any, keys: str, definitions: Schema) -> dict[str, tuple[Schema, bool]]:
    """The schema of each key, and whether it may be left out."""
    made: dict[str, tuple[Schema, bool]] = {}
    for key, path, optional in keys_of(keys):
        if path == "*":
            names = " ".join(_hints(record))
            made |= _properties(record, names, definitions)
        elif not key:
            kind, _ = _member(record, path)
            made |= _properties(kind, getattr(kind, "KEYS", "*"), definitions)
        else:
            kind, about = _member(record, path)
            described = {"description": about} if about else {}
            made[key] = {**described, **_schema(kind, definitions)}, optional
    return made


def _member(record: Any, path: str) -> tuple[Any, str]:
    """The type and the description of an attribute, or of one of a part."""
    kind, about = record, ""
    for name in path.split("."):
        inside = typing.get_args(kind)
        if inside:  # an item of a mapping or a tuple
            kind = inside[1] if len(inside) > 1 else inside[0]
        else:
            kind, about = _attribute(kind, name)
    return kind, about


def _attribute(record: Any, name: str) -> tuple[Any, str]:
    member = inspect.getattr_static(record, name, None)
    function = getattr(member, "fget", None) or getattr(member, "func", None)
    if isinstance(member, cached_property) or inspect.isfunction(function or member):
        function = function or member
        about = (inspect.getdoc(function) or "").partition(".")[0].replace("\n", " ")
        return _hints(function)["return"], about
    hints = _hints(record)
    if name not in hints:
        return typing.Literal[member], ""
    return hints[name], next(_comments(record, name), "")


def _hints(annotated: Any) -> dict[str, Any]:
    """The annotations of a class or a function; names that only a checker imports are Any."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(annotated, localns=unknown, include_extras=True)
        except NameError as error:
            unknown[str(error.name)] = Any


def _comments(record: Any, name: str) -> Iterator[str]:
    """The comment of a field in the source of its class."""
    for each in inspect.getmro(record) if inspect.isclass(record) else ():
        if name in inspect.get_annotations(each):
            yield from re.findall(rf"^    {name}: .*?  # (.+)$", inspect.getsource(each), re.M)
