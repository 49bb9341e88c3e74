"""Starts one engine with the connector, and prints why it died; exit status 0 if it lives.

python -m tests.project.fresh.broken_engine FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from pdconn.tools.lab.demo_run import DemoPlan, demo_specs
from pdconn.tools.lab.engine import running
from pdconn.tools.lab.lab_errors import EngineDied
from pdconn.tools.lab.model import TINY, write_model


def main(folder: Path) -> int:
    """Start the demo's prefill engine, without the check that the demo makes before."""
    folder.mkdir(parents=True, exist_ok=True)
    prefill = demo_specs(DemoPlan(write_model(folder), folder, TINY.vocab))[0]
    try:
        with running([prefill], folder):
            return 0
    except EngineDied as error:
        print(str(error).splitlines()[0])
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
