"""Benchmarks are run as real processes; one that fails changes nothing and is named."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.throughput.measured.__main__ import main
from tests.throughput.measured.book import Book
from tests.throughput.measured.catalog import (
    Benchmark,
    Command,
    Need,
    Table,
    library,
    package,
)
from tests.throughput.measured.record import BenchmarkFailed, NotHere, Record
from tests.throughput.measured.run import machine_in_words, measured
from tests.throughput.render import markdown

MS = Table(("all",), "", {"took": "{ms} ms"})
WRITE = "import json, pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(json.dumps({}))"


def printing(document: str) -> str:
    """A program that writes ``document`` where ``--json`` says."""
    return "python -c " + shlex.quote(WRITE.format(document))


def benchmark(name: str, *lines: str, **settings: object) -> Benchmark:
    commands = [Command("all" if at == 0 else str(at), line) for at, line in enumerate(lines)]
    return Benchmark(name, "?", ".", tuple(commands), 0.1, (MS,), **settings)  # type: ignore[arg-type]


def ignore(words: str) -> None:
    """Do nothing with what a benchmark prints."""


def test_a_record_holds_every_command_and_its_result_less_the_samples(tmp_path: Path) -> None:
    lines = printing('{"ms": 3, "walls": [1]}'), printing('[{"walls": 2, "p": 1}]')
    one = benchmark("one", *lines, drop=frozenset({"walls"}), packages=("numpy",))
    record = measured(one, tmp_path, ignore)
    assert [run.command for run in record.runs.values()] == list(lines)
    assert [run.result for run in record.runs.values()] == [{"ms": 3}, [{"p": 1}]]
    assert all(run.took_s > 0 for run in record.runs.values())
    assert {"python", "numpy"} <= record.versions.keys()


def test_above_a_table_stand_commands_date_machine_and_versions(tmp_path: Path) -> None:
    line = printing('{"ms": 3}')
    one = benchmark("one", line, packages=("numpy",))
    record = measured(one, tmp_path, ignore)
    above = markdown(one, record)
    assert f"- **Command**: `{line}`\n" in above
    assert f"results/one.json`, {record.measured_at[:10]}, " in above
    for words in (*machine_in_words().values(), f"numpy {record.versions['numpy']}."):
        assert words in above


def test_what_it_prints_is_heard_while_it_runs(tmp_path: Path) -> None:
    go = tmp_path / "go"
    lines_logged = []
    words = "import os, time; print('working', flush=True)\n"
    words += f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    line = "python -c " + shlex.quote(words + WRITE.format('{"ms": 3}'))

    def listen(line: str) -> None:
        lines_logged.append(line)
        if line == "working":
            go.touch()

    measured(benchmark("one", line), tmp_path, listen)
    assert "working" in lines_logged


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("python -c 'print(\"no luck\"); raise SystemExit(3)'", r"ended with 3.*\n    no luck"),
        ("python -c 'print(\"done\")'", r"wrote no JSON \(FileNotFoundError\).*\n    done"),
        (
            printing("half").replace("dumps(half)", "dumps(1)[:0]"),
            r"wrote no JSON \(JSONDecodeError",
        ),
    ],
)
def test_a_command_without_a_result_fails_with_its_last_words(
    tmp_path: Path, line: str, why: str
) -> None:
    with pytest.raises(BenchmarkFailed, match=why):
        measured(benchmark("one", line), tmp_path, ignore)


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    words = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    lines_logged = [""]
    one = benchmark("one", "python -c " + shlex.quote(words))
    with pytest.raises(BenchmarkFailed, match="takes too long"):
        measured(one, tmp_path, lines_logged.append, clock=lambda: 1e6 if lines_logged[-1] else 0.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(lines_logged[-1]), 0)


def test_what_a_machine_lacks_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    line = "python -c " + shlex.quote(f"open({str(ran)!r}, 'w')")
    needs = (Need("a moon", lambda: False), Need("a sun", lambda: True), package("no_such_thing"))
    with pytest.raises(NotHere, match=r"^needs a moon, the package no_such_thing$"):
        measured(benchmark("one", line, needs=needs), tmp_path, ignore)
    assert not ran.exists()


def test_libraries_and_packages_are_looked_for() -> None:
    assert package("json").met()
    assert not package("no_such_thing").met()
    assert library("libc.so.6").met()
    assert not library("libno_such_thing.so.1").met()


# The command


def place(name: str, table: str) -> str:
    return f"<!-- measured:{name} -->\n{table}<!-- /measured:{name} -->\n"


@pytest.fixture
def book(tmp_path: Path) -> Book:
    """Three benchmarks; the second fails.  All have been measured before."""
    lines = {"one": printing('{"ms": 1}'), "two": "python -c 1/0", "three": printing('{"ms": 3}')}
    benchmarks = {name: benchmark(name, line) for name, line in lines.items()}
    made = Book(tmp_path / "benchmarks.md", tmp_path / "results", benchmarks)
    made.page.write_text(
        "top\n" + "".join(place(name, "old\n") for name in lines), encoding="utf-8"
    )
    run = measured(benchmark("any", printing('{"ms": 9}')), tmp_path, ignore)
    for name in lines:
        made.keep(Record(name, run.measured_at, run.machine, run.versions, run.runs))
    assert main(["--render"], made) == 0
    return made


def cells(book: Book) -> list[str]:
    return [
        line
        for line in book.page.read_text(encoding="utf-8").splitlines()
        if line.endswith(" ms |")
    ]


def test_one_that_fails_leaves_its_table_and_result_and_the_others_go_on(
    book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cells(book) == ["| 9 ms |"] * 3
    before = (book.results / "two.json").read_bytes()
    assert main(["--run"], book, tmp_path) == 1
    assert cells(book) == ["| 1 ms |", "| 9 ms |", "| 3 ms |"]
    assert (book.results / "two.json").read_bytes() == before
    spoken = capsys.readouterr().err
    assert "1 of 3: one, about 0.1 min\n1 of 3: one: measured, 0:0" in spoken
    assert "2 of 3: two: not measured, left as it was" in spoken
    assert "two: python -c 1/0 ended with 1; its last words:" in spoken
    assert spoken.rstrip().endswith("ZeroDivisionError: division by zero")


def test_only_what_is_named_runs(book: Book, tmp_path: Path) -> None:
    assert main(["--run", "three", "three"], book, tmp_path) == 0
    assert cells(book) == ["| 9 ms |", "| 9 ms |", "| 3 ms |"]
    assert main(["--check"], book) == 0


def test_a_wrong_name_is_an_error_before_anything_runs(
    book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = book.page.read_bytes()
    assert main(["--run", "one", "tree"], book, tmp_path) == 1
    assert "one of one, two, three, got tree; did you mean 'three'?" in capsys.readouterr().err
    assert book.page.read_bytes() == before


def test_a_list_names_all_and_what_they_run(book: Book, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"], book) == 0
    printed = capsys.readouterr().out
    for one in book.benchmarks.values():
        assert one.name in printed
        assert one.commands[0].line in printed
