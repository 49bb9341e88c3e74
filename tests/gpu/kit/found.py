"""What a step found, written after each part, so that a time limit costs only what comes after."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transport import Device


class Found:
    """A file of JSON that grows; without a path it is printed at the end of each part."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._parts: dict[str, Any] = {}

    def add(self, part: str, found: Any) -> None:
        """Add what a part found."""
        self._parts[part] = found
        text = json.dumps(self._parts)
        if self._path is None:
            print(text, flush=True)
            return
        scratch = self._path.with_suffix(".part")
        scratch.write_text(text + "\n", encoding="utf-8")
        scratch.rename(self._path)

    def keep_logs(self, name: str, folder: Path) -> None:
        """Append a folder's logs to ``NAME.log`` beside what was found; dropped without a path."""
        if self._path is None:
            return
        with self._path.with_name(f"{name}.log").open("ab") as kept:
            for log in sorted(folder.glob("*.log")):
                kept.write(f"==== {log.name}\n".encode() + log.read_bytes() + b"\n")


def step_arguments(description: str | None) -> tuple[Device, Found]:
    """Parse ``--device`` and ``--found``, which every step takes."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--found", type=Path)
    options = parser.parse_args()
    return Device("cuda" if options.device == "cuda" else "cpu"), Found(options.found)
