"""What the commands of a router share: options, and a process that serves."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting, CannotListen, EnginesMissing
from pdconn.router.router_options import RouterOption, Unfit
from pdconn.tools.cli.proxy.proxy_logs import FORMATS, fail, log_to_stderr
from pdconn.tools.cli.proxy.serving import Events, RunRouter, serve


def add_options(parser: argparse.ArgumentParser, rows: Sequence[RouterOption]) -> None:
    """Add options of the router, and those of the command's output."""
    for row in rows:
        parser.add_argument(row.flag, **_arguments(row))
    parser.add_argument(
        "--json", action="store_true", help="print events as JSON, one per line, and the log too"
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        help="format of the log on stderr, which has a line per request (text; json with --json)",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="level of the log on stderr (%(default)s)",
    )


def _arguments(row: RouterOption) -> dict[str, Any]:
    """The arguments for ``add_argument`` beside the flag."""
    known: dict[str, Any] = {"dest": row.name, "help": row.explained}
    if isinstance(row.default, bool):
        return {**known, "action": "store_true"}
    known |= {"type": _parsing(row), "choices": row.choices or None}
    if row.takes or not row.choices:
        known["metavar"] = row.takes or row.flag.removeprefix("--").replace("-", "_").upper()
    if row.several == "+":
        return {**known, "nargs": "+", "action": "extend", "default": []}
    if row.several:
        return {**known, "action": "append", "default": []}
    return {**known, "default": row.default}


def _parsing(row: RouterOption) -> Callable[[str], Any]:
    if row.parse in (int, float, str):  # argparse has its own messages for these
        return row.parse

    def parse(word: str) -> Any:
        try:
            return row.parse(word)
        except Unfit as error:
            raise argparse.ArgumentTypeError(f"expected {error}, got {word!r}") from error

    return parse


def run_router(
    command: str, args: argparse.Namespace, rows: Sequence[RouterOption], running: RunRouter
) -> int:
    """Serve until a signal; returns 0, 1 or 2 as in ``--help``.

    Args:
        command: the command's name, for errors.
        args: what was parsed with ``add_options``.
        rows: the options that were added.
        running: the router, while a block runs.
    """
    log_format = args.log_format or ("json" if args.json else "text")
    log_to_stderr(args.log_level, log_format)
    try:
        config = _config(args, rows)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve(config, Events(command, args.json), running))
    except (BadSetting, CannotListen) as error:
        fail(command, error, log_format)
        return 2
    except EnginesMissing as error:
        fail(command, error, log_format)
        return 1


def _config(args: argparse.Namespace, rows: Sequence[RouterOption]) -> ProxyConfig:
    given = {row.name: getattr(args, row.name) for row in rows}
    several = {row.name: row.collect(given[row.name]) for row in rows if row.several}
    return ProxyConfig.from_options(**{**given, **several})


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's factory, if installed: a fifth less processor time a token."""
    if find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
