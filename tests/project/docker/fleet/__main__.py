"""``python -m tests.project.docker.fleet``: images, the fleet of ``compose.yaml``, all its checks.

As root on Debian.  Exit code 0 when every check holds, 1 when one does not, 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.project.docker.debian import DockerFailed, Say, base_image, engine, why_not
from tests.project.docker.fleet.checks import Checks
from tests.project.docker.fleet.containers import NotInTime, fleet
from tests.project.docker.fleet.images import Image, build, look, our_images

EXIT_OK, EXIT_WRONG, EXIT_NOT_HERE = 0, 1, 2


def printing() -> Say:
    """Print lines to standard error, each with the seconds since now."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    return say


def built(say: Say) -> list[Image]:
    """Both images, built on a base from Debian's archive."""
    build(base_image(say), say)
    images = [look(name) for name in our_images()]
    for image in images:
        say(
            f"{image.name}: {image.nbytes / 1e6:.0f} MB, "
            f"its wheels {image.wheels_nbytes / 1e6:.0f} MB"
        )
    return images


def check_all(checks: Checks) -> list[str]:
    """Every check of the fleet, one after the other; what is wrong about the network."""
    checks.same_answers()
    elsewhere = checks.kv_elsewhere()
    checks.killed("p1")
    checks.killed("d1")
    checks.killed("router")
    checks.paused("p2")
    checks.unplugged("d2")
    checks.restarted("p1", drained=True)
    checks.restarted("d1", drained=False)
    return elsewhere


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; see the module."""
    prog = "python -m tests.project.docker.fleet"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    parser.add_argument(
        "--directory", type=Path, default=Path(".work/compose"), help="for logs (%(default)s)"
    )
    args = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(f"compose: {reason}", file=sys.stderr)
        return EXIT_NOT_HERE
    say = printing()
    args.directory.mkdir(parents=True, exist_ok=True)
    try:
        with engine(say):
            images = built(say)
            with fleet(args.directory.resolve(), say) as running:
                checks = Checks(running, say)
                elsewhere = check_all(checks)
    except (DockerFailed, NotInTime) as failure:
        print(f"compose: {failure}", file=sys.stderr)
        return EXIT_WRONG
    if args.json:
        print(
            json.dumps(
                {
                    "images": [asdict(image) for image in images],
                    "steps": [step.as_json() for step in checks.steps],
                    "kv_elsewhere": elsewhere,
                }
            )
        )
    return EXIT_OK if all(step.ok for step in checks.steps) and not elsewhere else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
