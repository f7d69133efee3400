"""Files of records: what is written is read again; what is broken is named."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from bench.errors import BenchError
from bench.measure.record import Record
from bench.measure.record_files import read_records, write_records

RECORDS = [
    Record(
        id=0, scheduled=0.1, sent=0.125, end=0.75, chunks=[0.25, 0.375, 0.5], completion_tokens=3, text='žluť "😀"\n'
    ),
    Record(
        id=1,
        conversation=1,
        turn=2,
        client="slow",
        warmup=True,
        scheduled=1.0,
        sent=1.0,
        end=2.0,
        chunks=[0.5],
        input_tokens=7,
        output_tokens=5,
        shared_tokens=3,
        prompt_tokens=7,
        completion_tokens=1,
        cached_tokens=0,
        status=200,
        finish_reason="length",
        prompt_digest="ab",
    ),
    Record(id=2, sent=3.0, end=3.5, status=429, error="http_429", detail="busy", retry_after=1.5),
]
DERIVED = [(250.0, 125.0, 625.0), (500.0, None, 1000.0), (None, None, None)]


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("records", [RECORDS, []])
def test_what_is_written_is_read_again(tmp_path: Path, ending: str, records: list[Record]) -> None:
    path = tmp_path / f"records.{ending}"
    write_records(path, records)
    assert read_records(path) == records


def test_json_lines_have_latencies(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, RECORDS)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["ttft_ms"], row["tpot_ms"], row["e2e_ms"]) for row in rows] == DERIVED


def test_parquet_has_typed_columns_and_latencies(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "records.parquet"
    write_records(path, RECORDS)
    table = parquet.read_table(path)
    latencies = zip(*(table[name].to_pylist() for name in ("ttft_ms", "tpot_ms", "e2e_ms")), strict=True)
    assert list(latencies) == DERIVED
    assert str(table.schema.field("chunks").type).startswith("list<") and "double" in str(table.schema.field("chunks"))
    types = {name: str(table.schema.field(name).type) for name in ("id", "sent", "warmup", "error", "ttft_ms")}
    assert types == {"id": "int64", "sent": "double", "warmup": "bool", "error": "string", "ttft_ms": "double"}
    assert set(msgspec.structs.asdict(RECORDS[0])) < set(table.column_names)


def test_fields_that_a_file_lacks_have_their_defaults(tmp_path: Path) -> None:
    lines = tmp_path / "records.jsonl"
    lines.write_text('{"id": 4, "text": "x"}\n\n{"id": 5}\n')
    assert read_records(lines) == [Record(id=4, text="x"), Record(id=5)]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "records.parquet"
    parquet.write_table(pyarrow.table({"id": [4, 5], "text": ["x", ""], "mine": [1, 2]}), path)
    assert read_records(path) == [Record(id=4, text="x"), Record(id=5)]


def test_broken_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"id": 1}\n{"id": "one"}\n')
    with pytest.raises(BenchError, match=r"records\.jsonl, line 2 is no record: .*\$\.id"):
        read_records(path)
    path.write_bytes(b'{"id": 1, "text": "\xff"}\n')
    with pytest.raises(BenchError, match="line 1 is no record"):
        read_records(path)


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "records.parquet"
    path.write_text("no")
    with pytest.raises(BenchError, match="holds no records"):
        read_records(path)
    parquet.write_table(pyarrow.table({"other": [1]}), path)
    with pytest.raises(BenchError, match="holds no records"):
        read_records(path)


def test_other_endings(tmp_path: Path) -> None:
    for act in (lambda path: write_records(path, []), read_records):
        with pytest.raises(BenchError, match=r"\.jsonl or \.parquet"):
            act(tmp_path / "records.csv")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_paths_that_do_not_work(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "missing" / f"records.{ending}"
    with pytest.raises(BenchError, match="cannot be read: No such file"):
        read_records(path)
    with pytest.raises(BenchError, match="cannot be written: "):
        write_records(path, RECORDS)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BenchError, match=r"pip install 'tandem-serve\[bench\]'"):
        write_records(tmp_path / "records.parquet", RECORDS)
