"""Writes the tiny hybrid model to the directory given, for engines to be tried with."""

from __future__ import annotations

import sys
from pathlib import Path

from pdconn.tools.lab.model import write_model


def main(directory: Path) -> None:
    """Write it unless it is there; ``directory/tiny`` is its name, whatever it is made of."""
    written = write_model(directory)
    name = directory / "tiny"
    if not name.is_symlink():
        name.symlink_to(written.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
