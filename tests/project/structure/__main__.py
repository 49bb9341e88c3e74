"""Print the size of a checkout, and which goals it misses."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.project.structure.measure import facts, violations

ROOT = Path(__file__).parents[3]


def main() -> int:
    """Exit status 0, whatever was found: ``test_structure.py`` is the judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (this one)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args()
    found = facts(options.root)
    if options.json:
        print(json.dumps({**found, "misses": violations(options.root)}, indent=1))
        return 0
    twice = found.pop("defined more than once")
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}")
    assert isinstance(twice, dict)
    print("\ndefined more than once: " + ", ".join(f"{n} ({len(p)})" for n, p in twice.items()))
    print("\n".join(["", "misses:", *violations(options.root)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
