"""``pdconn proxy``: a router with an OpenAI API over prefill and decode engines."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from pdconn.cli.logs import FORMATS, fail, log_to_stderr
from pdconn.cli.serving import Events, serve
from pdconn.router.admission.budget import MAX_NBYTES, MAX_REQUESTS
from pdconn.router.admission.listener import STALL_S
from pdconn.router.config import ADMIN_ABOVE, ProxyConfig
from pdconn.router.errors import BadSetting, CannotListen, EnginesMissing
from pdconn.router.openai.requests import XARGS
from pdconn.router.prefix.hashing import ALGORITHMS
from pdconn.router.prefix.score import DEFAULT_WEIGHTS
from pdconn.router.routing.policy import POLICIES, PrefixAware

_EPILOG = """\
An OpenAI-compatible router for disaggregated serving. It sends each request to a
prefill engine for one token, then with the ticket of that answer
(kv_transfer_params) to a decode engine, and passes decode's answer to the client
byte for byte. If an engine cannot be reached, the router retries on another one and
probes the failed one's /health after 1, 2, 4, 8, 15, 15, ... seconds.

policies:
  prefix       the lowest cost in tokens: uncached prompt tokens + tokens queued
               (prefill) or requests in the batch (decode) + pressure on KV blocks.
               Prompts that begin alike go to the same engine if costs are equal. A
               decode engine that holds a prefix and lacks little of the rest serves
               the request alone (--alone-below)
  round-robin  engines take turns
  random       any engine

prefix cache: engines publish KV events if they run with
  --enable-prefix-caching --enable-prompt-tokens-details --kv-events-config
  '{"enable_kv_cache_events": true, "publisher": "zmq",
    "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
Add the endpoints to the URL:
  URL,events=tcp://{host}:5557,replay=tcp://{host}:5657[,ranks=N]
{host} stands for the URL's host; with N data-parallel ranks, rank r uses port + r.
The router detects how engines hash blocks. A hit ends where every KV cache group
(full attention, sliding windows, states) has the blocks that it needs. Engines
without events are chosen by load alone.

fleets that change:
  --fleet FILE       TOML, polled; tables [[engine]] with url, roles = ["prefill",
                     "decode"], and optionally events, replay, ranks, draining = true
                     (finishes its requests and gets no new ones)
  dns+http://NAME:PORT[,events=...]  instead of a URL: every address of the DNS name

Decode serves these requests alone and computes the prompt itself; /metrics counts
them by reason: several prompts in one body, n > 1, beam search, echo,
prompt_logprobs, prompt_embeds, truncate_prompt_tokens, a stored or background
response, tools that the engine calls itself, a prefix that decode holds, and every
request while no prefill engine answers, or lends nothing (--require-prefill: 503).

routes for clients:
  POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages
  GET  /v1/models
  POST /tokenize, /v1/embeddings, /score, /rerank, /pooling, /v1/audio/..., ...
                               one engine serves these; docs/router.md lists all
  GET  /health                 503 if no request can be served, 200 if some can: "ok",
                               or "degraded" without prefill
  GET  /readyz, /ready         the same, and 503 once SIGTERM has come
  GET  /livez                  200 while the process runs

admin pages, on --admin-host and --admin-port, without key or TLS:
  GET  /                       live page: engines, pods, hits, decisions with reasons
  GET  /debug/state            the same as JSON
  GET  /debug/route/ID         the decision for the request with this X-Request-Id;
                               ?snapshot=1: as a file for pdconn score
  GET  /metrics                for Prometheus; also /health, /readyz, /livez

signals:
  SIGTERM, SIGINT  /readyz answers 503 for --drain-delay; then the proxy stops
                   listening, requests have --drain-timeout to finish, and tickets of
                   those cut off are given back. A second one ends it at once
  SIGHUP           reads --fleet, --api-key-file, --tls-cert and --tls-key again and
                   resolves DNS names; a file with a mistake changes nothing

examples:
  pdconn proxy --prefill http://localhost:8100 --decode http://localhost:8200
  pdconn proxy --prefill http://p0:8000,events=tcp://{host}:5557,replay=tcp://{host}:5657 \\
      --decode http://d0:8000,events=tcp://{host}:5557 --host 0.0.0.0 --wait 300
  pdconn proxy --fleet fleet.toml --policy prefix
  pdconn proxy --fleet fleet.toml --host 0.0.0.0 --api-key-file keys.txt \\
      --tls-cert proxy.pem --tls-key proxy.key --drain-delay 5
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "m", "prompt": "Once upon a time", "max_tokens": 16}'

exit codes:
  0    stopped by SIGTERM or SIGINT, after draining
  1    --wait is over and a role has no engine that answers
  2    bad options, or the address is not available
  130  a second SIGINT: stopped without draining
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pdconn proxy``."""
    parser.epilog = _EPILOG
    urls = {"nargs": "+", "action": "extend", "default": [], "metavar": "URL"}
    parser.add_argument("--prefill", help="engines that compute prompts", **urls)  # type: ignore[arg-type]
    parser.add_argument("--decode", help="engines that generate answers", **urls)  # type: ignore[arg-type]
    parser.add_argument("--fleet", metavar="FILE", help="TOML file of engines, polled for changes")
    parser.add_argument(
        "--require-prefill",
        action="store_true",
        help="answer 503 where decode would have to compute a prompt that could have been handed "
        "over: no prefill engine answers, it lends nothing, or a ticket is spent",
    )
    _configure_policy(parser)
    _configure_listeners(parser)
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="before listening, wait up to this long for the engines' /health (no wait)",
    )
    parser.add_argument(
        "--drain-delay",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="on SIGTERM, first answer /readyz with 503 for this long and serve on (%(default)g)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="on SIGTERM, wait up to this long for running requests (%(default)g)",
    )
    parser.add_argument(
        "--connect-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time-out of connecting to an engine (%(default)g)",
    )
    parser.add_argument(
        "--max-body-mib",
        type=float,
        default=64.0,
        metavar="MIB",
        help="answer longer request bodies with 413 (%(default)g)",
    )
    _configure_admission(parser)
    _configure_output(parser)


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
        help="keys of clients, one a line, of which each request names one as "
        "'Authorization: Bearer KEY' (none: no key is needed)",
    )
    parser.add_argument(
        "--forward-authorization",
        action="store_true",
        help="pass the client's key on to engines (without --api-key-file it always passes)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain for clients, PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, PEM without passphrase")
    parser.add_argument(
        "--show-engines",
        action="store_true",
        help="tell clients engines' addresses: X-Pdconn-Engine, reasons of a 503, /health",
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
        help="answer 503 while this many requests are in flight (%(default)s)",
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
        help="decode that holds a prefix and lacks at most this serves it alone (%(default)s)",
    )
    parser.add_argument(
        "--pull-above",
        type=int,
        metavar="TOKENS",
        help="prefill pulls what another engine holds more of a prompt, from so many tokens on and "
        "where that is faster; every engine needs kv_role kv_both (never)",
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
        help="worth of a cached block by its medium (gpu=1 cpu=0.8 storage=0.5, others 1)",
    )


def _weight(word: str) -> tuple[str, float]:
    medium, found, weight = word.partition("=")
    if not found or not medium:
        raise argparse.ArgumentTypeError(f"expected MEDIUM=NUMBER, got {word!r}")
    try:
        return medium.lower(), float(weight)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected MEDIUM=NUMBER, got {word!r}") from error


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0, 1 or 2 as ``--help`` says."""
    log_format = args.log_format or ("json" if args.json else "text")
    log_to_stderr(args.log_level, log_format)
    try:
        config = _config(args)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(config, Events(args.json)))
    except (BadSetting, CannotListen) as error:
        fail("pdconn proxy", error, log_format)
        return 2
    except EnginesMissing as error:
        fail("pdconn proxy", error, log_format)
        return 1


def _config(args: argparse.Namespace) -> ProxyConfig:
    return ProxyConfig.of(
        args.prefill,
        args.decode,
        fleet=args.fleet,
        policy=args.policy,
        alone_below=args.alone_below,
        pull_above=args.pull_above,
        hash_algorithm=args.hash_algorithm,
        hash_block_tokens=args.hash_block_tokens,
        hash_seed=args.hash_seed,
        eagle_groups=tuple(args.eagle_group),
        weights={**DEFAULT_WEIGHTS, **dict(args.weight)},
        host=args.host,
        port=args.port,
        max_body_mib=args.max_body_mib,
        max_bodies_mib=args.max_bodies_mib,
        max_requests=args.max_requests,
        stall_timeout_s=args.stall_timeout,
        allow_xargs=tuple(args.allow_xargs),
        connect_timeout_s=args.connect_timeout,
        drain_delay_s=args.drain_delay,
        drain_timeout_s=args.drain_timeout,
        wait_s=args.wait,
        require_prefill=args.require_prefill,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        api_key_file=args.api_key_file,
        forward_authorization=args.forward_authorization,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        show_engines=args.show_engines,
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if installed (vLLM depends on it): half the work per token."""
    if find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
