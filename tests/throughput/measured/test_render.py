"""The tables of docs/benchmarks.md are what the committed results say, and only they change."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.throughput.measured.__main__ import BOOK, ROOT, main
from tests.throughput.measured.book import Book
from tests.throughput.measured.catalog import BENCHMARKS, Benchmark, Command, Table
from tests.throughput.measured.record import (
    MissingField,
    Record,
    Run,
    UnknownBenchmark,
    loads,
    replace_text,
)
from tests.throughput.render import BadMarker, rewritten

KNOWN = ("one", "two")


def place(name: str, table: str = "") -> str:
    return f"<!-- measured:{name} -->\n{table}<!-- /measured:{name} -->\n"


def record(name: str = "one", **result: object) -> Record:
    run = Run(f"python -m {name}", 1.5, {"ms": 3, **result})
    return Record(name, "2026-01-02T03:04:05+00:00", {"cores": "2 cores"}, {}, {"all": run})


def benchmark(name: str, cell: str = "{ms} ms") -> Benchmark:
    table = Table(("all",), "", {"took": cell})
    return Benchmark(name, "?", ".", (Command("all", f"python -m {name}"),), 1, (table,))


def book(
    tmp_path: Path,
    text: str,
    *records: Record,
    sync: Callable[[int], object] = os.fsync,
    **cells: str,
) -> Book:
    made = Book(
        tmp_path / "benchmarks.md",
        tmp_path / "results",
        {name: benchmark(name, cells.get(name, "{ms} ms")) for name in KNOWN},
        sync,
    )
    made.page.write_bytes(text.encode())
    made.results.mkdir(exist_ok=True)
    for each in records:
        (made.results / f"{each.benchmark}.json").write_text(each.dumps(), encoding="utf-8")
    return made


MADE = """- **Question**: ?
- **Configuration**: .
- **Command**: `python -m one`
- **Result**: `tests/throughput/results/one.json`, 2026-01-02, 2 cores, python unknown.

| took |
| --- |
| 3 ms |
"""


# The committed page


def test_the_page_is_what_the_committed_results_say() -> None:
    assert BOOK.faults() == []


def test_the_page_has_tables_that_were_measured() -> None:
    """The control: there is something to compare."""
    assert BOOK.records().keys() == BENCHMARKS.keys()


def test_one_digit_of_the_page_that_differs_is_found(tmp_path: Path) -> None:
    """The control: the committed page with one number of one table changed."""
    text = BOOK.page.read_text(encoding="utf-8")
    assert text.count("| claim | ") == 1
    page = tmp_path / "benchmarks.md"
    page.write_text(text.replace("| claim | ", "| claim | 1"), encoding="utf-8")
    made = dataclasses.replace(BOOK, page=page)
    assert made.faults() == ["waterfall: another table than its result makes"]


def test_the_renderer_is_short() -> None:
    assert (
        len((ROOT / "tests/throughput/render.py").read_text(encoding="utf-8").splitlines()) <= 200
    )


def test_committed_results_are_summaries_and_tell_no_machine_path() -> None:
    for path in BOOK.results.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert len(text) < 32 << 10, f"{path.name}: drop its samples"
        assert not re.search(r'"/[a-z]+/', text), path.name


def test_every_command_of_the_registry_can_be_found() -> None:
    for each in BENCHMARKS.values():
        for command in each.commands:
            program, *words = command.line.split()
            assert program in ("python", "pdconn")
            if program == "python":
                assert words[0] == "-m"
                assert find_spec(words[1]) is not None, command.line


# Between markers


def test_everything_outside_the_markers_is_kept_byte_for_byte() -> None:
    before, between, after = "# é\r\n\tx  \n\n", "\x0c mid  \n", "<!-- note -->\nno end of line"
    text = before + place("one", "old\n| a |\n") + between + place("two", "kept\r\n") + after
    new = rewritten(text, {"one": "| b |\n"}, KNOWN)
    assert new == before + place("one", "| b |\n") + between + place("two", "kept\r\n") + after


def test_rewriting_twice_is_rewriting_once() -> None:
    tables = {"one": "| b |", "two": "c\n\n"}
    once = rewritten("x\n" + place("one") + place("two", "old\n"), tables, KNOWN)
    assert once == "x\n" + place("one", "| b |\n") + place("two", "c\n")
    assert rewritten(once, tables, KNOWN) == once


def test_a_text_without_markers_stays() -> None:
    assert rewritten("measured: 3 ms\n", {"one": "t"}, KNOWN) == "measured: 3 ms\n"


BEGIN, END = "<!-- measured:one -->\n", "<!-- /measured:one -->\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (place("three"), "line 1: expected one of one, two, got three"),
        ("a\n" + place("one") + place("one"), "line 4: expected one table called one"),
        ("a\n" + BEGIN, "the end: expected <!-- /measured:one --> before it, got none"),
        (BEGIN + place("two"), "line 2: expected <!-- /measured:one -->, got <!-- measured:two"),
        (BEGIN + "<!-- /measured:two -->\n", "line 2: expected <!-- /measured:one -->"),
        (END, "line 1: expected the beginning of a table, got <!-- /measured:one -->"),
        (BEGIN + BEGIN + END, "line 2: expected <!-- /measured:one -->"),
        ("<!--measured:one-->\n" + END, "line 1: expected <!-- measured:NAME --> or"),
        ("see " + BEGIN + END, "alone on a line, got see <!-- measured:one -->"),
        ("<!-- measured one -->\n", "line 1: expected <!-- measured:NAME -->"),
    ],
)
def test_markers_that_make_no_sense_are_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(BadMarker, match=re.escape(message)):
        rewritten(text, {}, KNOWN)


# Results


def test_a_result_reads_as_it_was_written() -> None:
    assert loads("one", record().dumps()) == record()
    kept = loads("one", record(exact=[1.23456789e-5, 1234567]).dumps()).result("all")["exact"]
    assert kept.value == [1.23457e-5, 1234567], "rounded to six digits"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.pop("measured_at"), "one.measured_at"),
        (lambda d: d.update(measured_at="yesterday"), "one.measured_at"),
        (lambda d: d.update(benchmark="two"), "one.benchmark"),
        (lambda d: d.update(machine=[]), "one.machine"),
        (lambda d: d["runs"]["all"].pop("command"), "one.runs.all.command"),
        (lambda d: d["runs"]["all"].update(took_s=True), "one.runs.all.took_s"),
    ],
)
def test_a_result_that_lacks_a_field_is_refused_by_its_name(
    change: Callable[[dict[str, object]], object], field: str
) -> None:
    document = json.loads(record().dumps())
    change(document)
    with pytest.raises(MissingField) as error:
        loads("one", json.dumps(document))
    assert error.value.field == field


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(MissingField, match="one: expected JSON"):
        loads("one", "{")


# The book


def test_a_table_is_written_between_its_markers_with_what_made_it(tmp_path: Path) -> None:
    made = book(tmp_path, "a\n" + place("one") + "b\n", record())
    assert made.render()
    assert made.page.read_text(encoding="utf-8") == "a\n" + place("one", MADE) + "b\n"
    assert made.faults() == []
    assert not made.render(), "nothing is left to do"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (place("one", MADE.replace("3 ms", "2 ms")), "one: another table than its result makes"),
        (place("one", MADE + "\n"), "one: another table than its result makes"),
        (place("one", MADE) + place("two"), "two: a place, but no result"),
        ("nothing\n", "one: a result, but no <!-- measured:one --> to write it at"),
    ],
)
def test_what_is_not_as_measured_is_found(tmp_path: Path, text: str, fault: str) -> None:
    made = book(tmp_path, text, record())
    assert made.faults() == [fault]
    assert main(["--check"], made) == 1
    assert made.page.read_text(encoding="utf-8") == text, "a check writes nothing"


def test_a_result_of_an_unknown_benchmark_is_refused(tmp_path: Path) -> None:
    made = book(tmp_path, "", record("ones"))
    with pytest.raises(UnknownBenchmark, match="got ones; did you mean 'one'"):
        made.faults()


def test_a_table_that_cannot_be_made_leaves_the_page_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = place("one", "old\n") + place("two", "old\n")
    made = book(tmp_path, text, record(), record("two"), two="{missing:s}")
    assert main(["--render"], made) == 1
    assert capsys.readouterr().err == "two.all.missing: expected a value, got ms, run\n"
    assert made.page.read_text(encoding="utf-8") == text
    assert main(["--render"], book(tmp_path, text, record(), record("two"))) == 0, "the control"


def test_a_result_that_makes_no_table_does_not_replace_the_one_before(tmp_path: Path) -> None:
    made = book(tmp_path, "", record())
    with pytest.raises(MissingField, match=r"one\.all\.ms: expected a whole number, got 3\.5"):
        made.keep(record(ms=3.5))
    assert loads("one", (made.results / "one.json").read_text(encoding="utf-8")) == record()
    made.keep(record(ms=4))
    assert loads("one", (made.results / "one.json").read_text(encoding="utf-8")) == record(ms=4)


# Files


def test_a_file_keeps_its_mode_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.md"
    path.write_text("old", encoding="utf-8")
    path.chmod(0o640)
    replace_text(path, "new é\r\n")
    assert path.read_bytes() == "new é\r\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_breaks_off_leaves_the_old_file_whole(tmp_path: Path) -> None:
    def full(_: int) -> None:
        raise OSError("no space left")

    made = book(tmp_path, place("one", "old\n"), record(), sync=full)
    with pytest.raises(OSError, match="no space left"):
        made.render()
    assert made.page.read_text(encoding="utf-8") == place("one", "old\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmarks.md", "results"]


def test_a_reader_of_the_old_file_reads_it_to_its_end(tmp_path: Path) -> None:
    made = book(tmp_path, place("one", "old\n"), record())
    before = made.page.stat().st_ino
    with made.page.open() as reader:
        assert made.render()
        assert reader.read() == place("one", "old\n")
    assert made.page.stat().st_ino != before, "another file took the name"
