"""The page of measured tables, and the results that its tables are made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.throughput.measured.catalog import Benchmark
from tests.throughput.measured.record import Record, UnknownBenchmark, loads, replace_text
from tests.throughput.render import markdown, places, rewritten


@dataclass(frozen=True)
class Book:
    """A page, and the folder of the results that its tables are made of.

    Reading raises ``TablesError`` where a result or a marker is not what it must be.
    """

    page: Path
    results: Path
    benchmarks: Mapping[str, Benchmark]
    sync: Callable[[int], object] = os.fsync

    def records(self) -> dict[str, Record]:
        """Every result that there is."""
        found = {}
        for path in sorted(self.results.glob("*.json")):
            if path.stem not in self.benchmarks:
                raise UnknownBenchmark(path.stem, list(self.benchmarks))
            found[path.stem] = loads(path.stem, path.read_text(encoding="utf-8"))
        return found

    def render(self) -> bool:
        """Write every table that has a result and a place; whether that changed anything."""
        tables = {name: markdown(self.benchmarks[name], it) for name, it in self.records().items()}
        text = rewritten(self._text(), tables, self.benchmarks)
        if text == self._text():
            return False
        replace_text(self.page, text, self.sync)
        return True

    def keep(self, record: Record) -> None:
        """Write a result, once it is known that its tables can be made of what is written."""
        text, name = record.dumps(), record.benchmark
        markdown(self.benchmarks[name], loads(name, text))
        self.results.mkdir(exist_ok=True)
        replace_text(self.results / f"{name}.json", text, self.sync)

    def faults(self) -> list[str]:
        """Where the page differs from the results; empty if nowhere."""
        text, records = self._text(), self.records()
        found = places(text, self.benchmarks)
        faults = [f"{name}: a place, but no result" for name in found if name not in records]
        for name, record in records.items():
            if name not in found:
                faults.append(f"{name}: a result, but no <!-- measured:{name} --> to write it at")
            elif text[found[name]] != markdown(self.benchmarks[name], record):
                faults.append(f"{name}: another table than its result makes")
        return faults

    def _text(self) -> str:
        return self.page.read_bytes().decode()
