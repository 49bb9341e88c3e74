"""Options that several commands share, checked before anything starts."""

from __future__ import annotations

import argparse
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

from pdconn.tools.output.report import Report
from transport.errors import FieldError, shown

_TOKENS = re.compile(r"(\d{1,12})([kKmM]?)")
_JSON_HELP = "print the result as JSON; --json=FILE writes it there, beside the text"
_TIMES = {"": 1, "k": 1 << 10, "m": 1 << 20}


class BadArgument(FieldError, ValueError):
    """The value of an option is invalid."""


def tokens(text: str) -> int:
    """A number of tokens: ``8192``, or ``128k`` as models' context lengths are named.

    Raises:
        argparse.ArgumentTypeError: not a whole number.

    >>> tokens("8192"), tokens("128k"), tokens("1M")
    (8192, 131072, 1048576)
    """
    found = _TOKENS.fullmatch(text.strip()) if text.isascii() else None
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected a number of tokens such as 8192 or 128k (131072), got {shown(text)}"
        )
    return int(found[1]) * _TIMES[found[2].lower()]


def configure_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which is the same in every command; check a file with :func:`check_file`."""
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=_JSON_HELP)


def publish(report: Report, target: str | None, width: int | None = None) -> None:
    """Print ``report`` as text or JSON, according to ``--json``.

    Raises:
        OSError: the file cannot be written.
    """
    if publish_json(target, report.document()):
        print(report.text(width))


def publish_json(target: str | None, document: object) -> bool:
    """Print ``document`` as JSON, or write it, according to ``--json``.

    Returns:
        whether the text is still to be printed.

    Raises:
        OSError: the file cannot be written.
    """
    if target is None:
        return True
    text = json.dumps(document, indent=1, allow_nan=False)
    if target == "-":
        print(text)
        return False
    Path(target).write_text(f"{text}\n", encoding="utf-8")
    return True


def configure_guards(guards: argparse._ArgumentGroup) -> None:
    """Options of a client of side channels that have a secret or TLS."""
    guards.add_argument("--secret-file", metavar="FILE", help="file with the shared secret")
    guards.add_argument("--tls-cert", metavar="PEM", help="certificate of this client")
    guards.add_argument("--tls-key", metavar="PEM", help="key of that certificate")
    guards.add_argument("--tls-ca", metavar="PEM", help="CA that signs the engines' certificates")
    guards.add_argument(
        "--no-tls-check-hostname",
        dest="tls_check_hostname",
        action="store_false",
        help="accept a certificate of that CA for another host name",
    )


def check_file(option: str, path: str | Path | None) -> None:
    """Check that ``path`` can be written at the end; None and ``-`` are no files.

    Raises:
        BadArgument: its folder is missing or not writable, or the path is a folder.
    """
    if path is None or str(path) == "-":
        return
    path = Path(path)
    if path.is_dir():
        raise BadArgument(option, "a file to write", f"the folder {path}")
    if not path.parent.is_dir():
        raise BadArgument(option, "a file in a folder that exists", path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadArgument(option, "a file that can be written", path)


def check_picture(option: str, path: Path | None) -> None:
    """Check that matplotlib can write a picture at ``path``; None is accepted.

    Raises:
        BadArgument: as ``check_file``, or matplotlib is missing or does not know the suffix.
    """
    if path is None:
        return
    check_file(option, path)
    if find_spec("matplotlib") is None:
        raise BadArgument(option, "matplotlib to be installed (pdconn[demo])", "no matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in known:
        raise BadArgument(option, f"a suffix among {', '.join(known)}", path)
