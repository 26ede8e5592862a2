import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from unstable_lite.errors import UnstableError
from unstable_lite.files import RecordLog, keep_records, read_part, read_records, to_line, write_whole


def numbers(path: Path) -> list[int]:
    return [record["n"] for record in read_records(path)]


def write(path: Path, first: int, last: int, part_mb: float = 64) -> None:
    log = RecordLog(path, part_mb)
    for n in range(first, last):
        log.write({"n": n, "text": "x" * 100})
    log.close()


def test_full_parts_are_compressed_and_read_back_in_order(tmp_path):
    path = tmp_path / "games.jsonl"
    write(path, 0, 50, part_mb=0.002)
    write(path, 50, 100, part_mb=0.002)  # the log is opened again
    parts = sorted(file.name for file in tmp_path.iterdir())
    assert parts[0] == "games-000001.jsonl.gz"
    assert len(parts) > 4
    assert parts[-1] == "games.jsonl"
    assert path.stat().st_size < 2000
    assert numbers(path) == list(range(100))


@pytest.mark.parametrize("unfinished", ['{"n": 2, "te', '{"n": 2}', "x" * 200_000])
@pytest.mark.parametrize("written", [0, 2])
def test_crash_costs_only_the_unfinished_line(tmp_path, written, unfinished):
    path = tmp_path / "games.jsonl"
    write(path, 0, written)
    with path.open("a") as file:
        file.write(unfinished)
    assert numbers(path) == [*range(written)]
    write(path, written, 4)
    assert numbers(path) == [0, 1, 2, 3]


def test_part_left_both_plain_and_compressed_is_read_once(tmp_path):
    path = tmp_path / "games.jsonl"
    write(path, 0, 3)
    path.rename(tmp_path / "games-000001.jsonl")
    (tmp_path / "games-000001.jsonl.gz").write_bytes(gzip.compress((tmp_path / "games-000001.jsonl").read_bytes()))
    assert numbers(path) == [0, 1, 2]
    (tmp_path / "games-000001.jsonl.gz").unlink()
    assert numbers(path) == [0, 1, 2]


@pytest.mark.parametrize("line", ["not json", "[1, 2]"])
def test_broken_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "games.jsonl"
    path.write_text(f'{{"n": 0}}\n{line}\n{{"n": 1}}\n')
    with pytest.raises(UnstableError, match=r"games\.jsonl, line 2"):
        numbers(path)


@pytest.mark.parametrize(("text", "written"), [("all well", "all well"), ("half \ud83d a pair", "half ? a pair")])
def test_values_unknown_to_json_are_written_anyway(tmp_path, text, written):
    path = tmp_path / "step.jsonl.gz"
    notes = {"a": np.float32(0.5), "b": {1: np.int64(2), 2: np.float64(3)}, "c": {4}, "d": range(2), "e": 1 << 70}
    write_whole(path, [notes | {"text": text}])
    read = {"a": 0.5, "b": {"1": 2, "2": 3.0}, "c": [4], "d": "range(0, 2)", "e": 1 << 70}
    assert list(read_part(path)) == [read | {"text": written}]
    assert [file.name for file in tmp_path.iterdir()] == ["step.jsonl.gz"]
    assert json.loads(gzip.decompress(path.read_bytes()))


def test_non_finite_number_is_written_as_null():
    assert to_line({"x": float("nan"), "y": float("-inf")}) == b'{"x":null,"y":null}\n'
    assert to_line({"x": float("inf"), "text": "\ud83d"}) == b'{"x":null,"text":"?"}\n'


@pytest.mark.parametrize(
    ("order", "last_part"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], []),
        ([0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 3], [3]),
        ([0, 1, 5, 6, 7, 8, 2, 9, 10, 11, 3], [3]),
    ],
    ids=["a new part was just begun", "the newest part stays whole", "records behind others stay whole"],
)
def test_keep_records_removes_records_from_every_part(tmp_path, order, last_part):
    path = tmp_path / "games.jsonl"
    part = order[: len(order) - len(last_part)]
    log = RecordLog(path, part_mb=sum(len(to_line({"n": n})) for n in part[: len(part) // 2]) / 1e6)
    for n in order:
        log.write({"n": n})
    log.close()
    assert numbers(path) == order
    assert [record["n"] for record in read_part(path)] == last_part
    keep_records(path, lambda record: record["n"] < 5, num_late=2)
    assert numbers(path) == [n for n in order if n < 5]


def test_parts_that_hold_only_kept_records_are_not_read(tmp_path):
    path = tmp_path / "games.jsonl"
    write(path, 0, 100, part_mb=0.002)
    (tmp_path / "games-000001.jsonl.gz").write_bytes(b"takes long to read")
    keep_records(path, lambda record: record["n"] < 99, num_late=3)
    assert [record["n"] for record in read_part(path)][-1] == 98


@pytest.mark.parametrize("kept_bytes", [0.5, 0.99])
def test_truncated_compressed_part_is_named(tmp_path, kept_bytes):
    path = tmp_path / "games-000001.jsonl.gz"
    write_whole(path, [{"n": n} for n in range(1000)])
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept_bytes)])
    with pytest.raises(UnstableError, match=r"games-000001\.jsonl\.gz is damaged"):
        list(read_part(path))


def test_deleting_a_log_under_a_run_costs_only_its_records(tmp_path):
    path = tmp_path / "run" / "games.jsonl"
    path.parent.mkdir()
    log = RecordLog(path)
    log.write({"n": 1})
    path.unlink()
    log.write({"n": 2})
    log.write({"n": 3})
    assert numbers(path) == [2, 3]
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(OSError, match=r"games.jsonl"):
        log.write({"n": 4})
    path.parent.mkdir()
    log.write({"n": 5})
    assert numbers(path) == [5]
    log.close()
