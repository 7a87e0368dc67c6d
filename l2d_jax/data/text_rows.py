"""Reads rows of JSON and CSV files without guessing types: text stays text, whatever it looks like.

Arrow's readers convert texts that look like dates, and infer the type of a column from its first block. Here Python's
parsers read each file twice: once for the kinds of its values, and once to write them into an Arrow file, which is
mapped into memory. A column with only texts, only integers, only floats or only truth values becomes an Arrow column;
any other column is stored as JSON, row by row. A `.json` file with one array is held in memory as text while it is
read; other files are read line by line.
"""

import codecs
import csv
import gzip
import json
import math
import sys
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from io import BufferedIOBase, BufferedReader, TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa

from l2d_jax.errors import InputError, require, shown

BOM = codecs.BOM_UTF8
BLOCK = 1000  # rows that are written at a time
ARROW = {"str": "string", "int": "int64", "float": "float64", "bool": "bool"}  # by kind of values, if there is only one
LISTS = ("data", "rows")  # keys under which an object in a .json file may have its rows


def read_text_rows(file: Path, cache: Path) -> datasets.Dataset:
    """Read a JSON, JSON Lines or CSV file by way of an Arrow file in `cache`; raises `InputError`."""
    kept = cache / "rows.arrow"
    if not kept.is_file():
        kinds: dict[str, set[str]] = defaultdict(set)
        for row in _rows(file):
            for name, value in row.items():
                kinds[name] |= set() if value is None else {type(value).__name__}
        require(len(kinds) > 0, f"{file} has no rows: put one object a line into it")
        known = {name: ARROW.get(next(iter(found), "str")) if len(found) < 2 else None for name, found in kinds.items()}
        types = {name: datasets.Value(kind) if kind else datasets.Json() for name, kind in known.items()}
        _write(_rows(file), datasets.Features(types), kept)
    return datasets.Dataset.from_file(str(kept))


def as_json(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """Convert a column to JSON, row by row."""
    if isinstance(rows.features[column], datasets.Json):
        return rows
    features = datasets.Features({**rows.features, column: datasets.Json()})
    options = {"fn_kwargs": {"column": column}, "batched": True, "features": features}
    return rows.with_format("arrow").map(_dump, **options).with_format(None)


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column. Stored JSON is parsed here, because `datasets` would round numbers.

    Nulls in Arrow's objects are dropped: Arrow adds them to give all objects the same keys.
    """
    values = column.to_pylist()
    if isinstance(column.type, pa.JsonType):
        return [None if value is None else json.loads(value) for value in values]
    return list(map(_without_nulls, values))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _dump(rows: pa.Table, column: str) -> pa.Table:
    values = [None if value is None else json.dumps(value, default=str) for value in values_of(rows.column(column))]
    return rows.set_column(rows.column_names.index(column), column, pa.array(values, pa.json_()))


def _write(rows: Iterator[dict[str, Any]], features: datasets.Features, file: Path) -> None:
    """Write rows into an Arrow file, completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial, schema = file.with_name(f"{uuid.uuid4().hex}.partial"), features.arrow_schema
    try:
        with pa.OSFile(str(partial), "wb") as opened, pa.ipc.new_stream(opened, schema) as stream:
            while block := list(islice(rows, BLOCK)):
                columns = []
                for field in schema:
                    values = [row.get(field.name) for row in block]
                    if isinstance(features[field.name], datasets.Json):
                        values = [None if value is None else json.dumps(value) for value in values]
                    columns.append(pa.array(values, field.type))
                stream.write_batch(pa.record_batch(columns, schema=schema))
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as dictionaries; raises `InputError`."""
    name = file.name.removesuffix(".gz")
    opener: Any = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rb") as opened:
        if name.endswith(".csv"):
            yield from _csv_rows(opened, file)
        elif name.endswith(".json") and not _is_lines(opened):
            yield from _array_rows(opened, file)
        else:
            yield from _lines(opened, file)


def _is_lines(opened: BufferedIOBase) -> bool:
    """Whether a .json file has one object per line, as many do, instead of a single array or object."""
    lines = (text for line in opened if (text := line.removeprefix(BOM).strip()))
    first, second = next(lines, b""), next(lines, None)
    opened.seek(0)
    try:
        return second is not None and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _lines(opened: BufferedIOBase, file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON Lines."""
    for number, line in enumerate(opened, start=1):
        text = line.removeprefix(BOM).strip() if number == 1 else line.strip()
        if text:
            place = f"line {number} of {file}"
            yield _checked(_parse(text, place), place)


def _array_rows(opened: BufferedIOBase, file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of an array, or of the list that an object has under one of the keys `LISTS`."""
    rows = _parse(opened.read(), str(file))
    if isinstance(rows, dict):
        rows = next((rows[name] for name in LISTS if isinstance(rows.get(name), list)), [rows])
    for number, row in enumerate(rows):
        yield _checked(row, f"row {number} of {file} (the first is 0)")


def _checked(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{place} must be a JSON object, got {shown(value)}: fix or replace it")
    return value


def _parse(text: bytes, place: str) -> Any:
    """Parse a JSON text; raises an `InputError` that begins with `place`."""
    try:
        decoded = text.decode("utf-8-sig")
        hooks: dict[str, Any] = {"parse_constant": _number, "parse_float": _number, "parse_int": _integer}
        value = json.loads(decoded, object_pairs_hook=_unique, **hooks)
        if "\\ud" in decoded or "\\uD" in decoded:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        problem = "is nested too deep"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {error.start}"
    except UnicodeEncodeError:
        problem = "has a half of a surrogate pair, which is no character"
    except ValueError as error:
        problem = f"cannot be read: {error}"
    raise InputError(f"{place} {problem}: fix or replace it")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return found


def _number(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{shown(digits)} is not a finite number")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**63:
        raise ValueError(f"the integer {shown(digits)} has more than 64 bits, write it as text")
    return value


def _csv_rows(opened: BufferedIOBase, file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows after the line of column names; cells are text, except in the column `class`."""
    csv.field_size_limit(sys.maxsize)
    text = TextIOWrapper(cast(BufferedReader, opened), encoding="utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    try:
        names = next(reader, [])
        rule = f"the first line of {file} must name each column once"
        require(len(names) == len(set(names)) and "" not in names, f"{rule}, got {shown(names)}: fix it")
        for cells in filter(None, reader):
            problem = f"line {reader.line_num} of {file} has {len(cells)} cells, and the first line {len(names)}"
            require(len(cells) == len(names), f"{problem}: fix or replace it")
            row: Mapping[str, str] = dict(zip(names, cells, strict=True))
            yield {name: int(cell) if name == "class" and cell.isdecimal() else cell for name, cell in row.items()}
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 at byte {error.start} of a block: fix or replace it") from None
    except csv.Error as error:
        raise InputError(f"line {reader.line_num} of {file} cannot be read: {error}: fix or replace it") from None
