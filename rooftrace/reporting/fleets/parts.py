"""The rows of one task as the bytes of a parquet file, and such a file read again."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace.errors import RequestError
from rooftrace.reporting.fleets.tasks import Rows

if TYPE_CHECKING:
    import pyarrow

SUFFIX = ".parquet"
_OURS = b"rooftrace"
"""The key of the schema's metadata under which a part says whose it is."""
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
    """The releases on which rows depend, without what tells builds of one release apart.

    What is not installed is left out: a saved form is priced without torch.
    """
    known = {}
    for name in ("rooftrace", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name).partition("+")[0]
    return known


def part_bytes(rows: Rows, key: str) -> tuple[bytes, int]:
    """The parquet file of a task's rows, and how many rows it has.

    A whole number of more than 64 bits makes its column one of floats.  Raises RequestError for
    what is no table, with the column.
    """
    import pyarrow
    from pyarrow import parquet

    table = _table(rows)
    ours = {_OURS: json.dumps({"key": key, "releases": releases()})}
    sink = pyarrow.BufferOutputStream()
    try:
        parquet.write_table(table.replace_schema_metadata(ours), sink, write_page_checksum=True)
    except pyarrow.ArrowException as problem:
        raise RequestError(f"its rows cannot be written as parquet: {problem}") from None
    return sink.getvalue().to_pybytes(), table.num_rows


def read_part(path: Path, key: str) -> pyarrow.Table | None:
    """The table of a part; None where it is not there, damaged, of other work or other releases."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            ours = (file.schema_arrow.metadata or {}).get(_OURS, b"{}")
            if json.loads(ours) != {"key": key, "releases": releases()}:
                return None
            return file.read()
    except (OSError, ValueError, RecursionError, pyarrow.ArrowException):
        return None


def joined(tables: Iterable[pyarrow.Table]) -> Any:
    """One frame of pandas from the tables of parts; what a part has not is missing there.

    Whole numbers stay exact where some are missing: their column is Int64.
    """
    import pandas
    import pyarrow

    tables = list(tables)
    if not tables:
        return pandas.DataFrame()
    try:
        whole = pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException:  # a column of texts here and numbers there
        return pandas.concat([_frame(table) for table in tables], ignore_index=True)
    return _frame(whole.replace_schema_metadata(None))


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
