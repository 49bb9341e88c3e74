"""The ``pdconn`` command.

Each command is a module with two functions, named in ``COMMANDS``::

    def configure(parser: argparse.ArgumentParser) -> None   # its options and examples
    def run(args: argparse.Namespace) -> int                 # its work; the exit code

A module is imported only when its command is asked for, so ``pdconn --help``
neither waits for torch nor needs vLLM to be there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from pdconn import __version__

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


class CommandModule(Protocol):
    """What a command's module has to offer."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return an exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """One row of ``pdconn --help``."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("demo", "pdconn.cli.demo", "see it work, checked against one engine alone"),
    Command("diff", "pdconn.cli.diff", "compare two engines: what differs, what is refused"),
    Command("proxy", "pdconn.cli.proxy", "serve an OpenAI API over prefill and decode engines"),
    Command("score", "pdconn.cli.score", "explain where a request's prefix would be found"),
    Command("bench", "pdconn.cli.bench", "measure a pull, or prefill and decode as users see them"),
    Command("plan", "pdconn.cli.plan", "predict what a pull between two engines costs"),
)

_EXAMPLES = """\
examples:
  pdconn demo
  pdconn proxy --prefill http://localhost:8100 --decode http://localhost:8200
  pdconn plan --model gemma-3-27b --prefill tp=4 --decode tp=2
  pdconn score snapshot.json
  pdconn bench transfer --path shm-huge,tcp
  pdconn bench serve --contestants pdconn,single
  pdconn proxy --help

exit codes:
  0  all is well
  1  a check failed
  2  the command line or the settings make no sense
"""


def build_parser(configured: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; only the command ``configured`` has its options."""
    parser = argparse.ArgumentParser(
        prog="pdconn",
        description="Move KV caches from prefill to decode engines of vLLM.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pdconn {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.name == configured:
            module = cast(CommandModule, import_module(command.module))
            module.configure(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned, or raised by argparse."""
    argv = sys.argv[1:] if argv is None else list(argv)
    asked = next((word for word in argv if not word.startswith("-")), None)
    args = build_parser(configured=asked).parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return code


if __name__ == "__main__":
    sys.exit(main())
