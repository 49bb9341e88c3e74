"""``pdconn proxy``: a router with an OpenAI API over prefill and decode engines."""

from __future__ import annotations

import argparse

from pdconn.router.proxy_config import OPTIONS
from pdconn.router.router_server import running_proxy
from pdconn.tools.cli.proxy.proxy_epilog import EPILOG
from pdconn.tools.cli.proxy.router_command import add_options, run_router


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the router's options, and those of the command's output."""
    parser.epilog = EPILOG
    add_options(parser, OPTIONS)


def run_command(args: argparse.Namespace) -> int:
    """Serve until a signal; returns 0, 1 or 2 as in ``--help``."""
    return run_router("pdconn proxy", args, OPTIONS, running_proxy)
