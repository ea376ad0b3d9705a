"""Tasks of a fleet: keys, outcomes, parquet files of their rows, and the result of the fleet."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from rooftrace._reading import FileKind, json_of, record_of, text_of
from rooftrace._writing import put_bytes
from rooftrace.errors import RequestError, worded

if TYPE_CHECKING:
    import pyarrow


# -- outcomes --------------------------------------------------------------------------------------

_LONGEST = 500
"""Characters of an error's first line that are kept."""


@dataclass(frozen=True)
class TaskOutcome:
    """A task that ran: its part as bytes, or its error; one of the two is empty."""

    key: str
    title: str
    part: bytes = b""
    rows: int = 0
    error: str = ""


def outcome_of(task: Task) -> TaskOutcome:
    """Run a task here.  An error of its function, or rows that are no table, become its outcome.

    Raises KeyboardInterrupt only.
    """
    try:
        part, rows = part_bytes(task.function(**task.arguments), task.key)
    except (Exception, SystemExit) as error:  # whatever a user's model raises
        return failed(task, error)
    return TaskOutcome(task.key, task.title, part=part, rows=rows)


def failed(task: Task, error: BaseException) -> TaskOutcome:
    """The outcome of a task that raised."""
    lines = [line.strip() for line in worded(error).splitlines() if line.strip()]
    # "ImportError:" says nothing without the line below it.
    end = next((n for n, line in enumerate(lines, start=1) if not line.endswith(":")), len(lines))
    words = " ".join(lines[:end]) or type(error).__name__
    return TaskOutcome(task.key, task.title, error=words[:_LONGEST])


def unpacked_outcome(pickled: bytes, key: str, title: str, expected: dict[str, str]) -> TaskOutcome:
    """Run a task that came to a worker as bytes.

    Its outcome is an error where the worker lacks the code, or has other releases than the caller,
    which would give other rows.
    """
    import cloudpickle

    if releases() != expected:
        here, caller = (", ".join(map(" ".join, e.items())) for e in (releases(), expected))
        error = f"the worker has {here}, the caller {caller}: install the same releases there"
        return TaskOutcome(key, title, error=error)
    try:
        task = cloudpickle.loads(pickled)
    except Exception as problem:
        return TaskOutcome(
            key, title, error=f"the worker cannot load it: {worded(problem)}"[:_LONGEST]
        )
    return outcome_of(task)


# -- tasks -----------------------------------------------------------------------------------------

Rows = Any
"""The value of the function of a task: a list of plain dicts, or a frame of pandas."""


class FleetError(RuntimeError):
    """A fleet that could not go on: the reason, the parts that are kept, and what to do."""


@dataclass(frozen=True)
class Task:
    """A unit of work: `function(**arguments)` returns rows, as a list of dicts or a pandas frame.

    title: a few words for people.  key: names the file of its rows; made of the function's name and
    the arguments, so equal work has an equal key in every process.  It does not depend on code:
    where that changes, pass a revision among the arguments, or another folder.  Arguments are plain
    values, paths, enums, dataclasses, functions by their name, and containers of these; for others,
    and for a lambda or a function inside a function, name a key.

    Raises RequestError for a key that cannot name a file, or where none can be made.
    """

    title: str
    function: Callable[..., Rows]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise RequestError(
                f"task {self.title!r}: function={self.function!r:.60}: expected a function"
            )
        if not self.key:
            object.__setattr__(self, "key", _key(self))
        elif not names_a_file(self.key):
            raise RequestError(
                f"task {self.title!r}: key={self.key!r:.120}: expected 1 to 100 letters, digits, "
                '"-", "_" or ".", the first of them a letter or a digit'
            )


_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def names_a_file(key: Any) -> bool:
    """Whether a key can be the name of a file in a folder, on every system."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def _key(task: Task) -> str:
    """20 hexadecimal digits of the SHA-256 of the function and the arguments of a task."""
    try:
        contents = [_written(task.function), _written(dict(task.arguments))]
    except _NoText as problem:
        raise RequestError(
            f"task {task.title!r}: {problem}, so there is no key: name one with key="
        ) from None
    text = json.dumps(contents, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


class _NoText(Exception):
    """A value without a text that is the same in every process."""


def _written(value: Any) -> Any:
    """A value as lists and texts: two values that differ give two that differ."""
    if isinstance(value, Enum):
        return ["enum", _name(type(value)), value.name]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return ["int", str(int(value))]
    if isinstance(value, float):
        return ["float", repr(float(value))]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, PurePath):
        return ["path", value.as_posix()]
    if is_dataclass(value) and not isinstance(value, type):
        inside = {each.name: getattr(value, each.name) for each in fields(value)}
        return ["record", _name(type(value)), _written(inside)]
    if isinstance(value, Mapping):
        return ["dict", _sorted([[_written(key), _written(item)] for key, item in value.items()])]
    if isinstance(value, set | frozenset):
        return ["set", _sorted([_written(item) for item in value])]
    if isinstance(value, Sequence):
        return ["list", [_written(item) for item in value]]
    if isinstance(value, functools.partial):
        return ["partial", *map(_written, (value.func, value.args, value.keywords))]
    if callable(value):
        return ["function", _name(value)]
    raise _NoText(f"{value!r:.60} ({type(value).__name__}) is no plain value")


def _sorted(items: list[Any]) -> list[Any]:
    return sorted(items, key=json.dumps)


def _name(named: Any) -> str:
    """The module and name of a function or class.  Raises _NoText where that is ambiguous."""
    name = getattr(named, "__qualname__", "<")
    of_object = inspect.ismethod(named) and not isinstance(named.__self__, type)
    if "<" in name or of_object:
        raise _NoText(f"{named!r:.60} is no function or class at the top of a module")
    return f"{named.__module__}.{name}"


# -- parts -----------------------------------------------------------------------------------------

SUFFIX = ".parquet"
_OURS = b"rooftrace"
"""The key in the schema's metadata that marks a part."""
_INT64 = range(-(1 << 63), 1 << 63)


def need(library: str) -> None:
    """Raise RequestError where a library of the extra is not installed."""
    try:
        __import__(library)
    except ImportError:
        raise RequestError(
            f"a fleet needs {library}, which is not installed: pip install 'rooftrace[fleet]'"
        ) from None


@functools.cache
def releases() -> dict[str, str]:
    """The releases on which rows depend, without build tags.

    Packages that are not installed are left out: a saved form is priced without torch.
    """
    versions = {}
    for name in ("rooftrace", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name).partition("+")[0]
    return versions


def part_bytes(rows: Rows, key: str) -> tuple[bytes, int]:
    """The parquet file of a task's rows, and the number of rows.

    A whole number of more than 64 bits makes its column one of floats.  Raises RequestError, with
    the column, for rows that are no table.
    """
    import pyarrow
    from pyarrow import parquet

    table = _table(rows)
    ours = {_OURS: _label(key)}
    sink = pyarrow.BufferOutputStream()
    try:
        parquet.write_table(table.replace_schema_metadata(ours), sink, write_page_checksum=True)
    except pyarrow.ArrowException as problem:
        raise RequestError(f"its rows cannot be written as parquet: {problem}") from None
    return sink.getvalue().to_pybytes(), table.num_rows


def read_part(path: Path, key: str) -> pyarrow.Table | None:
    """The table of a part; None for a missing or damaged one, of other work or other releases."""
    import pyarrow
    from pyarrow import parquet

    if not path.is_file():  # also a pipe, which may never end
        return None
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            ours = (file.schema_arrow.metadata or {}).get(_OURS)
            return file.read() if ours == _label(key).encode() else None
    except (OSError, ValueError, pyarrow.ArrowException):
        return None


def is_part(path: Path) -> bool:
    """Whether a file is a part of a fleet, of any release: its label has the name of the file."""
    import pyarrow
    from pyarrow import parquet

    if not path.is_file():
        return False
    try:
        label = (parquet.read_schema(path).metadata or {}).get(_OURS, b"")
    except (OSError, ValueError, pyarrow.ArrowException):
        return False
    return bool(label.startswith(json.dumps({"key": path.stem}).encode()[:-1]))


def _label(key: str) -> str:
    """The label of a part, in its metadata."""
    return json.dumps({"key": key, "releases": releases()})


def joined(tables: Iterable[pyarrow.Table]) -> Any:
    """One frame of pandas from the tables of parts, with missing values where a part has none.

    Whole numbers stay exact where some are missing: their column is Int64.
    """
    import pandas
    import pyarrow

    tables = list(tables)
    if not tables:
        return pandas.DataFrame()
    try:
        table = pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException:  # a column of texts in one part and numbers in another
        return pandas.concat([_frame(part) for part in tables], ignore_index=True)
    return _frame(table.replace_schema_metadata(None))


def _frame(table: pyarrow.Table) -> Any:
    import pandas
    import pyarrow

    frame = table.to_pandas()
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count and pyarrow.types.is_integer(column.type):
            frame[name] = column.to_pandas(types_mapper={column.type: pandas.Int64Dtype()}.get)
    return frame


def _table(rows: Rows) -> pyarrow.Table:
    import pyarrow

    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):  # a frame; pandas stays unloaded
        try:
            return pyarrow.Table.from_pandas(rows, preserve_index=False)
        except (pyarrow.ArrowException, ValueError, TypeError) as problem:
            raise RequestError(f"its frame cannot be a parquet table: {problem}") from None
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise RequestError(
            f"it returned {rows!r:.60}: expected a list of dicts, or a frame of pandas"
        )
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        if not isinstance(name, str):
            raise RequestError(f"a key of its rows is {name!r:.60}: expected a text")
    return pyarrow.table({name: _column(name, [row.get(name) for row in rows]) for name in names})


def _column(name: str, values: list[Any]) -> pyarrow.Array:
    import pyarrow

    if any(type(value) is int and value not in _INT64 for value in values):
        values = [float(value) if isinstance(value, int) else value for value in values]
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError) as problem:
        reason = " ".join(str(problem).split())
        raise RequestError(f"column {name!r} of its rows is of no one type: {reason}") from None


# -- results ---------------------------------------------------------------------------------------

MANIFEST = "_fleet.json"
"""Readers of a folder of parquet files leave out names that begin with an underscore."""
_FORM = 1
_KIND = FileKind("manifest of a fleet", RequestError)


@dataclass(frozen=True)
class FleetFailure:
    """A task that has no rows, and why: the first line of its error."""

    key: str
    title: str
    error: str


@dataclass(frozen=True)
class FleetResult:
    """The tasks of a fleet and where their rows are: `out/KEY.parquet` for each that is done.

    tasks: titles by key, in the order of the call.  ran: how many tasks were run, failed ones
    included; the parts of the others were there.
    """

    out: Path
    tasks: Mapping[str, str]
    failures: tuple[FleetFailure, ...]
    ran: int

    def part(self, key: str) -> Path:
        """The file with the rows of a task."""
        return self.out / f"{key}{SUFFIX}"

    @property
    def waiting(self) -> tuple[str, ...]:
        """Keys of tasks that have neither a file nor a failure, as after a stop."""
        failed = {failure.key for failure in self.failures}
        return tuple(k for k in self.tasks if k not in failed and not self.part(k).exists())

    def frame(self) -> Any:
        """The rows of every task that is done, as one pandas frame, in the order of the tasks.

        The order in which tasks ended makes no difference.  A part that is damaged is left out; the
        next call of `run_fleet` makes it again.
        """
        need("pyarrow")
        tables = (read_part(self.part(key), key) for key in self.tasks)
        return joined(table for table in tables if table is not None)

    def frames(self) -> Iterator[tuple[str, Any]]:
        """The key and the rows of each task that is done, one pandas frame after the other."""
        need("pyarrow")
        for key in self.tasks:
            table = read_part(self.part(key), key)
            if table is not None:
                yield key, joined([table])

    def __str__(self) -> str:
        done = len(self.tasks) - len(self.failures) - len(self.waiting)
        words = f"{done} of {len(self.tasks)} tasks are in {self.out}"
        return f"{words}, {len(self.failures)} failed" if self.failures else words


@dataclass(frozen=True)
class _Manifest:
    """The values of `_fleet.json`."""

    form: int
    releases: dict[str, str]
    tasks: dict[str, str]
    failures: dict[str, str]


def load_fleet(out: str | Path) -> FleetResult:
    """The result of the last `run_fleet` into a folder so far, also while it runs.

    Raises RequestError for a folder without a manifest, or with one that cannot be read.
    """
    path = Path(out) / MANIFEST
    if not path.is_file():
        raise RequestError(f"{str(out)!r}: expected the folder of a fleet, which has a {MANIFEST}")
    where = str(path)
    table = record_of(_Manifest, json_of(text_of(path, _KIND), where, _KIND), where, _KIND)
    if table.form != _FORM:
        reason = f"form={table.form}: expected {_FORM}; it is of another release of rooftrace"
        raise _KIND.refused(where, reason)
    for key in (*table.tasks, *table.failures):
        if not names_a_file(key):
            raise _KIND.refused(where, f"tasks: the key {key!r:.60} names no file")
    failures = (
        FleetFailure(key, table.tasks.get(key, key), error) for key, error in table.failures.items()
    )
    return FleetResult(Path(out), table.tasks, tuple(failures), ran=0)


def write_manifest(out: Path, tasks: Mapping[str, str], failures: Iterable[FleetFailure]) -> None:
    """Write the tasks and the failures; a reader sees the old file or the new one."""
    table = {
        "form": _FORM,
        "releases": releases(),
        "tasks": dict(tasks),
        "failures": {failure.key: failure.error for failure in failures},
    }
    text = json.dumps(table, indent=1, ensure_ascii=True)
    put_bytes(out / MANIFEST, f"{text}\n".encode())
