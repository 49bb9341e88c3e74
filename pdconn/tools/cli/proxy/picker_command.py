"""``pdconn picker``: the router as an endpoint picker of a gateway."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from pdconn.router.proxy_config import OPTIONS
from pdconn.router.router_options import RouterOption
from pdconn.tools.cli.proxy.router_command import add_options, run_router

DEFAULT_PORT = 9002
"""The port of endpoint pickers in the Gateway API Inference Extension."""

_OF_THE_LISTENER = ("cors_origins",)
"""Options of answers to clients, which a gateway has in place of a picker."""

_OTHERWISE: Mapping[str, Mapping[str, Any]] = {
    "port": {"default": DEFAULT_PORT},
    "stall_timeout_s": {"help": "answer 408 to a request whose body takes longer for each 256 KiB"},
}
"""What differs from the options of ``pdconn proxy``."""

_EPILOG = """\
An endpoint picker: Envoy, or a gateway built on it, asks it where to send each
request, by Envoy's external processor (gRPC). It asks prefill itself, puts the
ticket into the request's body and names the decode engine, and others in case that
one cannot be reached, in the header and the metadata
x-gateway-destination-endpoint (namespace envoy.lb). The answer goes from the engine
through the gateway to the client; no byte of it passes through this process.
Engines are chosen as by pdconn proxy, with the same options.

the gateway's external processor:
  request_body_mode    BUFFERED, or FULL_DUPLEX_STREAMED (then the trailer modes are
                       SEND); with BUFFERED a picker that dies costs no request
                       where failure_mode_allow is true
  request_header_mode, response_header_mode  SEND
  response_body_mode   NONE
  response_attributes  upstream.address, so that the engine that answered is known
  metadata_options     receiving_namespaces, untyped: envoy.lb
  message_timeout      longer than a prefill may take
The cluster of decode engines has the load-balancing policy override_host. A retry
policy may have connect-failure only: a ticket is for one engine.
examples/envoy has all of it; docs/gateway.md explains it.

Routes, limits, keys, admin pages, /metrics and signals are those of pdconn proxy.
The health service of gRPC (grpc.health.v1) is as /readyz.
It needs pdconn[gateway].

exit codes:
  0    stopped by SIGTERM or SIGINT, after draining
  1    --wait is over and a role has no engine that answers
  2    bad options, the address is not available, or pdconn[gateway] is missing
  130  a second SIGINT: stopped without draining

examples:
  pdconn picker --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000
  pdconn picker --fleet fleet.toml --host 0.0.0.0 --port 9002 --admin-host 0.0.0.0
"""


def _options() -> tuple[RouterOption, ...]:
    ours = (row for row in OPTIONS if row.name not in _OF_THE_LISTENER)
    return tuple(
        dataclasses.replace(row, **_OTHERWISE[row.name]) if row.name in _OTHERWISE else row
        for row in ours
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the router's options, and those of the command's output."""
    parser.epilog = _EPILOG
    add_options(parser, _options())


def run_command(args: argparse.Namespace) -> int:
    """Serve until a signal; returns 0, 1 or 2 as in ``--help`` of ``pdconn proxy``."""
    try:
        from pdconn.router.picker.picker_server import running_picker
    except ImportError as error:
        print(f"pdconn picker: {error}; pip install 'pdconn[gateway]'", file=sys.stderr)
        return 2
    return run_router("pdconn picker", args, _options(), running_picker)
