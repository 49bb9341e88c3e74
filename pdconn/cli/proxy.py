"""``pdconn proxy``: a router with an OpenAI API over prefill and decode engines."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from pdconn.router.admission.budget import MAX_NBYTES, MAX_REQUESTS
from pdconn.router.admission.listener import STALL_S
from pdconn.router.config import ProxyConfig
from pdconn.router.errors import BadSetting, CannotListen, EnginesMissing
from pdconn.router.openai.requests import XARGS
from pdconn.router.prefix.hashing import ALGORITHMS
from pdconn.router.prefix.score import DEFAULT_WEIGHTS
from pdconn.router.routing.policy import POLICIES, PrefixAware
from pdconn.router.server import EngineReady, Running, running_proxy

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
prompt_logprobs, prompt_embeds, truncate_prompt_tokens, a prefix that decode holds.

routes:
  POST /v1/completions, /v1/chat/completions     GET /v1/models, /health, /metrics
  GET  /                       live page: engines, pods, hits, decisions with reasons
  GET  /debug/state            the same as JSON
  GET  /debug/route/ID         the decision for the request with this X-Request-Id;
                               ?snapshot=1: as a file for pdconn score

examples:
  pdconn proxy --prefill http://localhost:8100 --decode http://localhost:8200
  pdconn proxy --prefill http://p0:8000,events=tcp://{host}:5557,replay=tcp://{host}:5657 \\
      --decode http://d0:8000,events=tcp://{host}:5557 --host 0.0.0.0 --wait 300
  pdconn proxy --fleet fleet.toml --policy prefix
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "m", "prompt": "Once upon a time", "max_tokens": 16}'

exit codes:
  0  stopped by SIGTERM or SIGINT, after draining
  1  --wait is over and a role has no engine that answers, or a second signal
  2  bad options, or the address is not available
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pdconn proxy``."""
    parser.epilog = _EPILOG
    urls = {"nargs": "+", "action": "extend", "default": [], "metavar": "URL"}
    parser.add_argument("--prefill", help="engines that compute prompts", **urls)  # type: ignore[arg-type]
    parser.add_argument("--decode", help="engines that generate answers", **urls)  # type: ignore[arg-type]
    parser.add_argument("--fleet", metavar="FILE", help="TOML file of engines, polled for changes")
    _configure_policy(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0: any free one (%(default)s)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="before listening, wait up to this long for the engines' /health (no wait)",
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
    parser.add_argument("--json", action="store_true", help="print events as JSON, one per line")
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="level of the log on stderr (%(default)s)",
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
        help="worth of a cached block by its medium (gpu=1 cpu=0.8, others 1)",
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
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = ProxyConfig.of(
            args.prefill,
            args.decode,
            fleet=args.fleet,
            policy=args.policy,
            alone_below=args.alone_below,
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
            drain_timeout_s=args.drain_timeout,
            wait_s=args.wait,
        )
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, _Events(args.json)))
    except (BadSetting, CannotListen) as error:
        print(f"pdconn proxy: {error}", file=sys.stderr)
        return 2
    except EnginesMissing as error:
        print(f"pdconn proxy: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1  # a second signal during the drain


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if installed (vLLM depends on it): half the work per token."""
    if find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory


class _Events:
    """Progress on stdout, as sentences or as JSON lines."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def emit(self, sentence: str, event: str, **facts: object) -> None:
        line = json.dumps({"event": event, **facts}) if self._as_json else sentence
        print(line, flush=True)

    def waiting(self, config: ProxyConfig) -> None:
        engines = list(dict.fromkeys(config.prefill + config.decode))
        engines += [] if config.fleet is None else [config.fleet]
        self.emit(
            f"waiting up to {config.wait_s:g} s for {', '.join(engines)}",
            "waiting",
            engines=engines,
            wait_s=config.wait_s,
        )

    def ready(self, one: EngineReady) -> None:
        self.emit(
            f"{one.engine} ready after {one.after_s:.1f} s ({one.num_ready} of {one.num_engines})",
            "engine_ready",
            engine=one.engine,
            after_s=round(one.after_s, 3),
        )

    def listening(self, proxy: Running) -> None:
        config = proxy.config
        fleet = "" if config.fleet is None else f"; fleet file {config.fleet}"
        self.emit(
            f"pdconn proxy on {proxy.url} ({config.policy}): "
            f"prefill by {', '.join(config.prefill) or 'none'}; "
            f"decode by {', '.join(config.decode) or 'none'}{fleet}",
            "listening",
            url=proxy.url,
            policy=config.policy,
            prefill=config.prefill,
            decode=config.decode,
            fleet=config.fleet,
        )

    def draining(self, config: ProxyConfig) -> None:
        self.emit(
            f"stopping: requests have {config.drain_timeout_s:g} s to finish",
            "draining",
            drain_timeout_s=config.drain_timeout_s,
        )


async def _serve(config: ProxyConfig, events: _Events) -> int:
    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in one
    _on_first_signal(task.cancel)
    if config.wait_s is not None:
        events.waiting(config)
    try:
        async with running_proxy(config, events.ready) as proxy:
            stop = asyncio.Event()
            _on_first_signal(stop.set)
            events.listening(proxy)
            await stop.wait()
            events.draining(config)
    except asyncio.CancelledError:
        pass  # stopped before listening: there is nothing to drain
    return 0


def _on_first_signal(act: Callable[[], object]) -> None:
    """Call ``act`` on the first SIGTERM or SIGINT; the next one has its default effect."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def once() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
        act()

    for number in numbers:
        loop.add_signal_handler(number, once)
