"""``pdconn bench``: the throughput of pulls, and the latency of engines."""

from __future__ import annotations

import argparse

from pdconn.tools.cli import bench_serve, bench_transfer

_EPILOG = """\
examples:
  pdconn bench transfer
  pdconn bench serve
  pdconn bench serve --help

exit codes:
  0    measured, and every byte or token was right
  1    it failed, or brought wrong bytes or tokens
  2    invalid options
  130  interrupted by Ctrl-C
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of benchmark."""
    parser.epilog = _EPILOG
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    transfer = kinds.add_parser(
        "transfer",
        help="move KV-shaped memory between two processes or hosts",
        description="Move KV-shaped memory between two processes, or from another host.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_transfer.configure(transfer)
    transfer.set_defaults(bench=bench_transfer.run_command, prog=transfer.prog)
    serve = kinds.add_parser(
        "serve",
        help="measure prefill and decode, the in-tree connector and a single engine, in turns",
        description="Measure latency and goodput of real engines, ours or running ones, in turns.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_serve.configure(serve)
    serve.set_defaults(bench=bench_serve.run_command, prog=serve.prog)


def run_command(args: argparse.Namespace) -> int:
    """Run the selected benchmark."""
    code: int = args.bench(args)
    return code
