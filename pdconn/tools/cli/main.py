"""The ``pdconn`` command.

Each command is a module with two functions, named in ``COMMANDS``::

    def configure(parser: argparse.ArgumentParser) -> None   # its options and examples
    def run_command(args: argparse.Namespace) -> int         # its work; the exit code

A module is imported only when its command runs, so ``pdconn --help`` does not import torch and
works without vLLM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from pdconn import __version__
from pdconn.tools.cli import EXIT_INTERRUPTED
from pdconn.tools.cli.parser import Parser
from pdconn.tools.cli.stdout import OutputClosed, watch_stdout

EXIT_FAILED = 1


class CommandModule(Protocol):
    """The functions of a command's module."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def run_command(self, args: argparse.Namespace) -> int:
        """Run the command and return an exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """One row of ``pdconn --help``.

    ``needs_reader``: the output is the result, so closing it early is a failure.
    """

    name: str
    module: str
    summary: str
    needs_reader: bool = False


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "pdconn.tools.cli.demo_command",
        "run engines and proxy here, and check every answer",
        needs_reader=True,
    ),
    Command(
        "doctor",
        "pdconn.tools.cli.doctor_command",
        "diagnose a host, a pair or a fleet",
    ),
    Command("diff", "pdconn.tools.cli.diff_command", "check whether two engines can exchange KV"),
    Command(
        "proxy",
        "pdconn.tools.cli.proxy.proxy_command",
        "serve an OpenAI API over prefill and decode engines",
    ),
    Command(
        "picker",
        "pdconn.tools.cli.proxy.picker_command",
        "tell a gateway, such as Envoy, where to send each request",
    ),
    Command(
        "score",
        "pdconn.tools.cli.score_command",
        "explain how the router scores a request's prefix",
    ),
    Command(
        "bench",
        "pdconn.tools.cli.bench_command",
        "measure transfers, or the latencies that clients see",
        needs_reader=True,
    ),
    Command("plan", "pdconn.tools.cli.plan_command", "predict the cost of a pull, without engines"),
    Command("store", "pdconn.tools.cli.store.store_command", "list, verify and remove stored KV"),
    Command(
        "completion",
        "pdconn.tools.cli.completion_command",
        "print a script for shell completion",
    ),
)

_EXAMPLES = """\
examples:
  pdconn demo
  pdconn proxy --prefill http://localhost:8100 --decode http://localhost:8200
  pdconn doctor --config prefill.json
  pdconn plan --model gemma-3-27b --prefill tp=4 --decode tp=2
  pdconn score snapshot.json
  pdconn store ls /mnt/kv
  pdconn bench transfer --path shm-huge,tcp
  pdconn bench serve --contestants pdconn,single
  pdconn proxy --help
  source <(pdconn completion bash)

exit codes:
  0    success
  1    a check failed, or something could not be started or reached
  2    bad command line or settings
  130  interrupted by Ctrl-C
demo and bench also end with 1 if standard output is closed before the result is written.
pdconn COMMAND --help has the options, examples and exit codes of a command.
"""


def build_parser(configured: str | None = None) -> Parser:
    """The whole command line; only the command ``configured`` has its options."""
    parser = Parser(
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
            sub.set_defaults(
                run=module.run_command, prog=sub.prog, needs_reader=command.needs_reader
            )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, or argparse raises it."""
    argv = sys.argv[1:] if argv is None else list(argv)
    asked = next((word for word in argv if not word.startswith("-")), None)
    if asked in ("proxy", "picker") and threading.current_thread() is threading.main_thread():
        # By default it ends the process, until the proxy uses it for reloads.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    output = watch_stdout()
    name = "pdconn"
    try:
        args = build_parser(configured=asked).parse_args(argv)
        name = args.prog
        if output is not None:
            output.needs_reader = args.needs_reader
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail(name, "interrupted", EXIT_INTERRUPTED)
    except (OutputClosed, BrokenPipeError) as error:
        return _fail(name, str(error), EXIT_FAILED)
    return code


def _fail(name: str, why: str, code: int) -> int:
    """Print the error to standard error, which may be closed too."""
    try:
        print(f"{name}: {why}", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nothing to flush at exit
    return code


if __name__ == "__main__":
    sys.exit(main())
