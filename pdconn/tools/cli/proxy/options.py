"""The options of ``pdconn proxy``."""

from __future__ import annotations

import argparse

from pdconn.router.admission.budget import MAX_NBYTES
from pdconn.router.admission.listener import STALL_S
from pdconn.router.admission.queue import MAX_REQUESTS, WAIT_S
from pdconn.router.config import ADMIN_ABOVE
from pdconn.router.fleet.health import PROBE_TIMEOUT_S
from pdconn.router.fleet.loads import LEASE_S
from pdconn.router.openai.requests import XARGS
from pdconn.router.prefix.hashing import ALGORITHMS
from pdconn.router.routing.policy import POLICIES, PrefixAware
from pdconn.router.routing.tokenize import TIMEOUT_S
from pdconn.tools.cli.logs import FORMATS
from pdconn.tools.cli.proxy.text import EPILOG


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pdconn proxy``."""
    parser.epilog = EPILOG
    urls = {"nargs": "+", "action": "extend", "default": [], "metavar": "URL"}
    parser.add_argument("--prefill", help="engines that compute prompts", **urls)  # type: ignore[arg-type]
    parser.add_argument("--decode", help="engines that generate answers", **urls)  # type: ignore[arg-type]
    parser.add_argument("--fleet", metavar="FILE", help="TOML file of engines, polled for changes")
    parser.add_argument(
        "--require-prefill",
        action="store_true",
        help="answer 503 if decode would have to compute a prompt that could have been handed "
        "over, because no prefill engine answers, it lends nothing, or the ticket has been used",
    )
    _configure_policy(parser)
    _configure_listeners(parser)
    _configure_times(parser)
    parser.add_argument(
        "--max-body-mib",
        type=float,
        default=64.0,
        metavar="MIB",
        help="answer longer request bodies with 413 (%(default)g)",
    )
    _configure_admission(parser)
    _configure_traces(parser)
    _configure_output(parser)


def _configure_times(parser: argparse.ArgumentParser) -> None:
    def seconds(option: str, default: float | None, says: str) -> None:
        shown = " (%(default)g)" if default is not None else ""
        parser.add_argument(
            option, type=float, default=default, metavar="SECONDS", help=says + shown
        )

    wait = "before listening, wait up to this long for the engines' /health (no wait)"
    seconds("--wait", None, wait)
    warm_up = (
        "before listening, hand a short prompt over between all engines, for at most this long; "
        "later also for engines that join or come back (no warm-up)"
    )
    seconds("--warm-up", None, warm_up)
    delay = "on SIGTERM, first answer /readyz with 503 for this long and serve on"
    seconds("--drain-delay", 0.0, delay)
    seconds("--drain-timeout", 30.0, "on SIGTERM, wait up to this long for running requests")
    parser.add_argument(
        "--retries",
        type=int,
        metavar="N",
        help="after a failure, ask at most this many other engines of the role (all)",
    )
    seconds("--connect-timeout", 5.0, "time-out of connecting to an engine")
    prefill = "wait this long for prefill's ticket, then ask another engine (no time-out)"
    seconds("--prefill-timeout", None, prefill)
    whole = "answer 504 this long after a request arrived, or break its answer off (no time-out)"
    seconds("--request-timeout", None, whole)
    tokens = "route a prompt without its tokens if no engine tells them in this time"
    seconds("--tokenize-timeout", TIMEOUT_S, tokens)
    seconds("--health-timeout", PROBE_TIMEOUT_S, "time-out of an engine's /health")
    lease = "the engines' kv_lease_duration: a third of it is the time to return a ticket"
    seconds("--lease", LEASE_S, lease)


def _configure_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print events as JSON, one per line, and the log too"
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        help="of the log on stderr, which has a line per request (text; json with --json)",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="level of the log on stderr (%(default)s)",
    )


def _configure_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="export a trace of every request there, such as http://collector:4318/v1/traces; "
        "needs pdconn[otel] (no traces)",
    )


def _configure_listeners(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0: any free one (%(default)s)"
    )
    parser.add_argument(
        "--admin-host", default="127.0.0.1", help="address of the admin pages (%(default)s)"
    )
    parser.add_argument(
        "--admin-port",
        type=int,
        metavar="PORT",
        help=f"port of the admin pages; 0: any free one ({ADMIN_ABOVE} above --port)",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="keys of clients, one per line; each request must send one as "
        "'Authorization: Bearer KEY' (without it no key is needed)",
    )
    parser.add_argument(
        "--forward-authorization",
        action="store_true",
        help="pass the client's key on to engines (without --api-key-file it is always passed on)",
    )
    parser.add_argument(
        "--engine-key-file",
        metavar="FILE",
        help="the key that engines require; the proxy sends it when it asks for their models, and "
        "in place of clients' keys with --api-key-file and without --forward-authorization",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain for clients, PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, PEM without passphrase")
    parser.add_argument(
        "--cors-origin",
        nargs="+",
        action="extend",
        default=[],
        metavar="ORIGIN",
        help="let pages of these origins send requests from a browser, such as "
        "https://chat.example; *: all origins",
    )
    parser.add_argument(
        "--show-engines",
        action="store_true",
        help="show engines' addresses to clients: X-Pdconn-Engine, reasons of a 503, /health",
    )


def _configure_admission(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-bodies-mib",
        type=float,
        default=MAX_NBYTES / (1 << 20),
        metavar="MIB",
        help="answer 503 while all request bodies together would be longer (%(default)g)",
    )
    parser.add_argument(
        "--max-requests",
        type=int,
        default=MAX_REQUESTS,
        metavar="N",
        help="serve this many requests at a time; more wait, or get 503 (%(default)s)",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=0,
        metavar="N",
        help="of the requests above --max-requests, let this many wait (%(default)s)",
    )
    parser.add_argument(
        "--queue-timeout",
        type=float,
        default=WAIT_S,
        metavar="SECONDS",
        help="answer 503 to a request that has waited this long (%(default)g)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=STALL_S,
        metavar="SECONDS",
        help="close a client's connection that does not send its request or read its answer "
        "(%(default)g)",
    )
    parser.add_argument(
        "--allow-xargs",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"further names that clients may use in vllm_xargs (always: {', '.join(XARGS)})",
    )


def _configure_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        default=PrefixAware.name,
        choices=tuple(POLICIES),
        help="how to choose engines (%(default)s)",
    )
    parser.add_argument(
        "--alone-below",
        type=int,
        default=256,
        metavar="TOKENS",
        help="decode serves a prompt alone if it holds a prefix and lacks at most this many tokens "
        "(%(default)s)",
    )
    parser.add_argument(
        "--pull-above",
        type=int,
        metavar="TOKENS",
        help="let prefill pull a prefix from another engine that holds at least this many tokens "
        "more of it, if that is faster; every engine needs kv_role kv_both (never)",
    )
    parser.add_argument(
        "--reuse-tokens",
        action="store_true",
        help="decode takes a chat's token ids from prefill instead of rendering and tokenizing it "
        "again; other requests are handed over as usual",
    )
    parser.add_argument(
        "--hash-algorithm",
        choices=tuple(ALGORITHMS),
        help="the engines' --prefix-caching-hash-algo (detected)",
    )
    parser.add_argument(
        "--hash-block-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of one hashed block; with --hash-algorithm (detected)",
    )
    parser.add_argument("--hash-seed", metavar="SEED", help="the engines' PYTHONHASHSEED (unset)")
    parser.add_argument(
        "--eagle-group",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="index of a KV cache group that an EAGLE or MTP drafter reads; repeatable",
    )
    parser.add_argument(
        "--weight",
        type=_weight,
        action="append",
        default=[],
        metavar="MEDIUM=W",
        help="worth of a cached block by its medium (gpu=1 cpu=0.8 storage=0.5 fs=0.5 remote=0.3 "
        "obj=0.3, others 1)",
    )


def _weight(word: str) -> tuple[str, float]:
    medium, found, weight = word.partition("=")
    if not found or not medium:
        raise argparse.ArgumentTypeError(f"expected MEDIUM=NUMBER, got {word!r}")
    try:
        return medium.lower(), float(weight)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected MEDIUM=NUMBER, got {word!r}") from error
