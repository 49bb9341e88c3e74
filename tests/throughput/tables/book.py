"""The README and the results that its tables are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.throughput.tables.benchmark import Benchmark
from tests.throughput.tables.errors import UnknownBenchmark
from tests.throughput.tables.files import replace_text
from tests.throughput.tables.markers import regions, rewritten
from tests.throughput.tables.record import Record, loads


@dataclass(frozen=True)
class Book:
    """``results`` is the folder of ``NAME.json``.

    Reading raises ``TablesError`` where a result or a marker is not what it must be.
    """

    readme: Path
    results: Path
    benchmarks: Mapping[str, Benchmark]

    def records(self) -> dict[str, Record]:
        """Every result that there is."""
        found = {}
        for path in sorted(self.results.glob("*.json")):
            if path.stem not in self.benchmarks:
                raise UnknownBenchmark(path.stem, list(self.benchmarks))
            found[path.stem] = loads(path.stem, path.read_text())
        return found

    def rendered(self) -> str:
        """The README as its results have it."""
        tables = {
            name: self.benchmarks[name].markdown(record) for name, record in self.records().items()
        }
        return rewritten(self._text(), tables, self.benchmarks)

    def render(self) -> bool:
        """Write :meth:`rendered`; whether that changed anything."""
        text = self.rendered()
        if text == self._text():
            return False
        replace_text(self.readme, text)
        return True

    def keep(self, record: Record) -> None:
        """Write a result, once it is known that its table can be made of what is written."""
        text = record.dumps()
        self.benchmarks[record.benchmark].markdown(loads(record.benchmark, text))
        self.results.mkdir(exist_ok=True)
        replace_text(self.results / f"{record.benchmark}.json", text)

    def faults(self) -> list[str]:
        """What of the README is not what the results say; empty if all of it is."""
        text, records = self._text(), self.records()
        places = {each.name: text[each.start : each.end] for each in regions(text, self.benchmarks)}
        found = [f"{name}: a place, but no result" for name in places if name not in records]
        for name, record in records.items():
            if name not in places:
                found.append(f"{name}: a result, but no <!-- measured:{name} --> to write it at")
            elif places[name] != self.benchmarks[name].markdown(record):
                found.append(f"{name}: another table than its result makes")
        return found

    def _text(self) -> str:
        return self.readme.read_bytes().decode()
