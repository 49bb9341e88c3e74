"""``pdconn proxy``: a router with an OpenAI API over prefill and decode engines."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from pdconn.router.config import ProxyConfig
from pdconn.router.errors import BadSetting, CannotListen, EnginesMissing
from pdconn.router.prefix.score import DEFAULT_WEIGHTS
from pdconn.tools.cli.logs import fail, log_to_stderr
from pdconn.tools.cli.proxy.options import configure
from pdconn.tools.cli.serving import Events, serve

__all__ = ["configure", "run"]


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


_SAME = (
    *("fleet", "policy", "alone_below", "pull_above", "reuse_tokens", "require_prefill"),
    *("hash_algorithm", "hash_block_tokens", "hash_seed"),
    *("host", "port", "admin_host", "admin_port", "tls_cert", "tls_key"),
    *("api_key_file", "forward_authorization", "engine_key_file", "show_engines"),
    *("max_body_mib", "max_bodies_mib", "max_requests", "max_queue", "retries"),
    "otlp_traces_endpoint",
)
"""Options that settings have the names of."""
_SECONDS = (
    *("stall_timeout", "connect_timeout", "prefill_timeout", "request_timeout", "queue_timeout"),
    *(
        "tokenize_timeout",
        "health_timeout",
        "lease",
        "wait",
        "warm_up",
        "drain_delay",
        "drain_timeout",
    ),
)
"""Options that settings have the names of with ``_s`` after them."""


def _config(args: argparse.Namespace) -> ProxyConfig:
    return ProxyConfig.of(
        args.prefill,
        args.decode,
        **{name: getattr(args, name) for name in _SAME},
        **{f"{name}_s": getattr(args, name) for name in _SECONDS},
        eagle_groups=tuple(args.eagle_group),
        weights={**DEFAULT_WEIGHTS, **dict(args.weight)},
        allow_xargs=tuple(args.allow_xargs),
        cors_origins=tuple(args.cors_origin),
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if installed (vLLM depends on it): half the work per token."""
    if find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
