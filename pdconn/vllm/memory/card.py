"""The network card that carries KV, by settings, environment and machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from pdconn.sidechannel.host_cards import (
    read_cards,
    routes_of,
    side_channel_addresses,
    without_route,
)
from pdconn.sidechannel.kv_card import (
    AUTO,
    KEY,
    HostCards,
    KVCard,
    NoSuchCard,
    asked_card,
    side_channel_card,
)
from pdconn.sidechannel.quiet_log import QuietLog
from pdconn.vllm.config import ConfigError, Settings

log = logging.getLogger(__name__)


def kv_card(settings: Settings, environ: Mapping[str, str] = os.environ) -> KVCard:
    """The network card that carries KV; the user's settings for UCX take precedence.

    Raises:
        ConfigError: ``kv_interface`` names a card that this machine does not have.
    """
    wanted = settings.kv_interface
    if settings.transport == "nixl" and "UCX" not in settings.backends:
        return KVCard((), f"{KEY}: {wanted} is not used: it applies to NIXL's UCX backend only")
    own = f"UCX_NET_DEVICES={environ['UCX_NET_DEVICES']}" if "UCX_NET_DEVICES" in environ else ""
    if not own:
        given = settings.backend_options.get("UCX", {}).get("engine_config", "").split(",")
        parts = (part.strip() for part in given)
        own = next((p for p in parts if p.removeprefix("UCX_").startswith("NET_DEVICES=")), "")
    if own:
        return KVCard((), f"KV goes over what {own} allows, which overrides {KEY}: {wanted}")
    try:
        host = read_cards(environ=environ)
    except OSError as error:
        log.warning("pdconn: the network cards of this machine cannot be listed: %s", error)
        host = HostCards()
    if wanted == AUTO:
        listening = settings.side_channel_host, settings.advertise_host
        return side_channel_card(side_channel_addresses(*listening, environ), host)
    try:
        return asked_card(wanted, host)
    except NoSuchCard as error:
        raise ConfigError(error.field, error.expected, error.seen, error.hint) from error


def why_unreachable(devices: Sequence[str]) -> Callable[[str], str] | None:
    """Returns why an address cannot be served over ``devices``; None where UCX chooses."""
    cards = [device for device in devices if ":" not in device]
    if len(cards) != 1 or len(devices) != 1:  # RDMA needs no route; several cards have several
        return None

    warn = QuietLog(log).warning

    def why(host: str) -> str:
        try:
            if without_route(cards[0], host, routes_of):
                reason = f"KV goes over {cards[0]}, which has no route to {host}"
                warn("pdconn: connection refused: %s; add one, or set %s", reason, KEY)
                return reason
        except (OSError, ValueError) as error:  # UCX reports an unreachable peer itself
            log.debug("pdconn: routes are unknown: %s", error)
        return ""

    return why
