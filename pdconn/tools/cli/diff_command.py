"""``pdconn diff``: compares two engines: whether they can exchange KV, and if not, why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from pdconn.planning.comparison import Comparison, compare
from pdconn.protocol.compat import Difference
from pdconn.protocol.errors import ProtocolError
from pdconn.protocol.messages import Described, check_geometry
from pdconn.sidechannel.connection import SideChannelLost
from pdconn.sidechannel.describe import describe
from pdconn.sidechannel.security import Security, SecurityError
from pdconn.tools.cli.common_options import (
    BadArgument,
    check_file,
    configure_guards,
    configure_json,
    publish,
)
from pdconn.tools.output.table import table
from registration import RegistrationError

_EPILOG = """\
A and B are each a side channel (HOST:PORT of a prefill engine) or a description file.
An engine writes one at its start when kv_connector_extra_config has "description_file";
--save writes that of a running engine.

Engines with a secret or TLS answer only clients that have it too. The secret is read
from --secret-file, or as engines do from PDCONN_SECRET_FILE or PDCONN_SECRET.

examples:
  pdconn diff 10.0.0.1:5600 decode.json
  pdconn diff 10.0.0.1:5600 10.0.0.2:5600 --json
  pdconn diff 10.0.0.1:5600 --save prefill.json
  pdconn diff 10.0.0.1:5600 decode.json --secret-file /run/secrets/pdconn

exit codes:
  0  each can pull from the other (layouts, block sizes and parallelism may differ)
  1  one of them cannot pull from the other: the fields that prevent it are shown
  2  an engine does not answer, a file is not a description or cannot be written, or bad options
"""


class NoDescription(Exception):
    """An argument does not lead to an engine's description."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pdconn diff``."""
    parser.epilog = _EPILOG
    parser.add_argument("a", metavar="A", help="HOST:PORT or a description file")
    parser.add_argument("b", metavar="B", nargs="?", help="the other engine")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write A's description to FILE")
    configure_json(parser)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        help="seconds to wait for an engine (default: %(default)s)",
    )
    configure_guards(parser.add_argument_group("engines with a secret or TLS"))


def run_command(args: argparse.Namespace) -> int:
    """Compare and print; the exit code is the verdict."""
    if args.b is None and args.save is None:
        print("pdconn diff: give a second engine, or --save FILE", file=sys.stderr)
        return 2
    try:
        check_file("--save", args.save)
        check_file("--json", args.json)
        security = _security(args)
        a = _described(args.a, args.timeout, security)
        if args.save is not None:
            args.save.write_bytes(msgspec.json.format(msgspec.json.encode(a)) + b"\n")
        if args.b is None:
            return 0
        b = _described(args.b, args.timeout, security)
    except (NoDescription, BadArgument, SecurityError, OSError) as error:
        print(f"pdconn diff: {error}", file=sys.stderr)
        return 2
    comparison = compare(a, b)
    publish(ComparisonReport(comparison, args.a, args.b), args.json)
    return 0 if comparison.compatible else 1


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"expected above 0 and below 86400, got {text}")
    return seconds


def _security(args: argparse.Namespace) -> Security:
    return Security.load(
        secret_file=args.secret_file,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_ca=args.tls_ca,
        tls_check_hostname=args.tls_check_hostname,
    )


def _described(where: str, timeout_s: float, security: Security) -> Described:
    path = Path(where)
    if path.is_file():
        try:
            described = msgspec.json.decode(path.read_bytes(), type=Described)
            check_geometry(described)
        except (msgspec.DecodeError, RegistrationError, ProtocolError, RecursionError) as error:
            raise NoDescription(f"{where}: expected an engine's description: {error}") from error
        return described
    if "://" in where:
        expected = "expected HOST:PORT of a side channel or an existing file"
        raise NoDescription(f"{where}: {expected}, no URL: the side channel is not the HTTP port")
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise NoDescription(f"{where!r}: expected HOST:PORT or an existing file")
    try:
        return describe(host.strip("[]"), int(port), timeout_s, security)
    except (OSError, SideChannelLost, ProtocolError) as error:
        why = str(error).removeprefix(f"{where}: ")
        raise NoDescription(f"{where}: {why}") from error


@dataclass(frozen=True)
class ComparisonReport:
    """The differences between the engines named by ``a`` and ``b``."""

    comparison: Comparison
    a: str
    b: str

    def text(self, width: int | None = None) -> str:
        """A table of the differences, and a verdict per direction; ignores ``width``."""
        traits = self.comparison.traits
        rows = [
            [one.field, one.theirs, one.ours, verdict]
            for verdict, found in (("refused", traits), ("differs", self.comparison.shapes))
            for one in found
        ]
        seen_by_a = [Difference(one.field, one.ours, one.theirs) for one in traits]
        parts = [
            table(["field", self.a, self.b, ""], rows) if rows else "no difference",
            _verdict(self.a, self.b, [*seen_by_a, *self.comparison.a_pulls]),
            _verdict(self.b, self.a, [*traits, *self.comparison.b_pulls]),
        ]
        return "\n\n".join(parts)

    def document(self) -> dict[str, object]:
        """The differences, and whether each can pull from the other."""
        return {**asdict(self.comparison), "compatible": self.comparison.compatible}


def _verdict(reader: str, lender: str, obstacles: Sequence[Difference]) -> str:
    if not obstacles:
        return f"{reader} can pull from {lender}"
    reasons = "\n".join(f"  {obstacle}" for obstacle in obstacles)
    return f"{reader} cannot pull from {lender}:\n{reasons}"
