"""The ``pdconn`` command.

Each command is a module with two functions, named in ``COMMANDS``::

    def configure(parser: argparse.ArgumentParser) -> None   # its options and examples
    def run(args: argparse.Namespace) -> int                 # its work; the exit code

A module is imported only when its command runs, so ``pdconn --help`` does not import
torch and works without vLLM.
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
    """What a command's module has."""

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
    Command("demo", "pdconn.cli.demo", "run engines and proxy here, and check every answer"),
    Command("diff", "pdconn.cli.diff", "check whether two engines can exchange KV"),
    Command("proxy", "pdconn.cli.proxy", "serve an OpenAI API over prefill and decode engines"),
    Command("score", "pdconn.cli.score", "explain how the router scores a request's prefix"),
    Command("bench", "pdconn.cli.bench", "measure transfers, or the latencies that clients see"),
    Command("plan", "pdconn.cli.plan", "predict the cost of a pull, without engines"),
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
  0  success
  1  a check failed, or something could not be started or reached
  2  bad command line or settings
pdconn COMMAND --help has the options, examples and exit codes of a command.
"""


def build_parser(configured: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; only the command ``configured`` has its options."""
    parser = argparse.ArgumentParser(
        prog="pdconn",
        description="Transfer KV caches from prefill to decode engines of vLLM.",
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
    """Run one command; returns the exit code, or argparse raises it."""
    argv = sys.argv[1:] if argv is None else list(argv)
    asked = next((word for word in argv if not word.startswith("-")), None)
    args = build_parser(configured=asked).parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output closed it, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return code


if __name__ == "__main__":
    sys.exit(main())
