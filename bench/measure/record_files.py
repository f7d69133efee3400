"""Files of records, one for each request: JSON lines to read, Parquet to query and plot."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from bench.errors import BenchError
from bench.measure.record import Record

_JSON_LINES = (".jsonl", ".json")
_PARQUET = ".parquet"
_NAMES = tuple(field.name for field in msgspec.structs.fields(Record))


def write_records(path: Path, records: list[Record]) -> None:
    """Writes JSON lines (.jsonl, .json) or Parquet (.parquet). Raises BenchError.

    Besides the fields of Record each has ttft_ms, tpot_ms and e2e_ms, null where there is none.
    """
    require_ending(path)
    try:
        if path.suffix == _PARQUET:
            _write_parquet(path, records)
        else:
            encode = msgspec.json.Encoder().encode
            with path.open("wb") as file:
                file.writelines(encode(_row(record)) + b"\n" for record in records)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror or error}") from error


def read_records(path: Path) -> list[Record]:
    """Reads what `write_records` wrote. Raises BenchError with file, line and reason."""
    require_ending(path)
    try:
        return _read_parquet(path) if path.suffix == _PARQUET else _read_json_lines(path)
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror or error}") from error


def require_ending(path: Path) -> None:
    """Raises BenchError unless the ending is one of a kind of file that is known."""
    if path.suffix not in (*_JSON_LINES, _PARQUET):
        raise BenchError(f"{path}: records are kept in .jsonl or .parquet; give the file one of these endings")


def _row(record: Record) -> dict[str, Any]:
    derived = {"ttft_ms": record.ttft, "tpot_ms": record.tpot, "e2e_ms": -1.0 if record.error else record.e2e}
    in_ms = {name: 1e3 * seconds if seconds >= 0 else None for name, seconds in derived.items()}
    return msgspec.structs.asdict(record) | in_ms


def _read_json_lines(path: Path) -> list[Record]:
    decode = msgspec.json.Decoder(Record).decode
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                records.append(decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BenchError(f"{path}, line {number} is no record: {error}") from error
    return records


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise BenchError("Parquet needs pyarrow: pip install 'tandem-serve[bench]', or use .jsonl") from error


def _write_parquet(path: Path, records: list[Record]) -> None:
    pa, parquet = _pyarrow()
    column_types = {
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
        bool: pa.bool_(),
        list[float]: pa.list_(pa.float64()),
    }
    columns = [(field.name, column_types[field.type]) for field in msgspec.structs.fields(Record)]
    columns += [(name, pa.float64()) for name in ("ttft_ms", "tpot_ms", "e2e_ms")]
    table = pa.Table.from_pylist([_row(record) for record in records], schema=pa.schema(columns))
    with path.open("wb") as file:
        parquet.write_table(table, file, compression="zstd")


def _read_parquet(path: Path) -> list[Record]:
    pa, parquet = _pyarrow()
    try:
        with path.open("rb") as opened:
            file = parquet.ParquetFile(opened)
            present = [name for name in _NAMES if name in file.schema_arrow.names]
            rows = file.read(columns=present).to_pylist()
        return msgspec.convert(rows, list[Record])
    except (pa.ArrowInvalid, msgspec.ValidationError) as error:
        raise BenchError(f"{path} holds no records: {error}") from error
