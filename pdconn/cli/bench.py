"""``pdconn bench``: what a pull costs beside what the wire could do."""

from __future__ import annotations

import argparse

from pdconn.cli import bench_transfer

_EPILOG = """\
examples:
  pdconn bench transfer
  pdconn bench transfer --help

exit codes:
  0  measured, and every byte was right
  1  it failed, or brought wrong bytes
  2  options that make no case
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
    transfer.set_defaults(bench=bench_transfer.run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was asked for."""
    code: int = args.bench(args)
    return code
