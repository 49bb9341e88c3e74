"""What gateways report of the requests that they were told to send on, and what they leave out.

A picker sees neither a gateway's configuration nor answers.  Settings that are missing show in what
gateways do, and each is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pdconn.router.labels import PickEnd, RequestEnd
from pdconn.router.router_metrics import RouterMetrics

log = logging.getLogger(__name__)

MOST_MISSED = 4
"""Requests without an answer's head, from gateways that sent none yet, that may be departures of
clients: their tickets are returned, and nothing is logged."""
MOST_LATE_S = 1.0
"""How much later than the picker's time-out a gateway's may end a request."""
_MOST_WARNED = 1024


class GatewayReports:
    """Counts what becomes of picks, and warns of settings that gateways lack."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._has_seen_heads = False
        self._num_missed = 0
        self._warned: set[str] = set()

    def head_came(
        self, endpoints: Mapping[str, str], upstream: str | None, request_id: str
    ) -> PickEnd:
        """Note the head of an answer.

        Args:
            endpoints: that the gateway was given, in order.
            upstream: the one that it reports; None if it reports none.
        """
        self._has_seen_heads = True
        first = next(iter(endpoints))
        if upstream is None:
            end = PickEnd.UNTOLD
        elif upstream in endpoints:
            end = PickEnd.FIRST if upstream == first else PickEnd.NEXT
        else:
            end = PickEnd.ELSEWHERE
            self._warn_once(
                first,
                "the gateway sends requests elsewhere than to the endpoint that was picked: its "
                "cluster may lack it, or may not take the picker's metadata "
                f"picked={first} sent_to={upstream} request={request_id}",
            )
        self._metrics.pick_answered(end)
        return end

    def head_missed(self) -> tuple[RequestEnd, bool]:
        """Note a request that ended without the head of an answer.

        Returns:
            How it ended, and whether its ticket may be unused.
        """
        # 1. Heads come, so this one would have: its client has left.
        if self._has_seen_heads:
            return RequestEnd.CLIENT_LEFT, True
        # 2. None has come yet: its client may have left, or the gateway reports none.
        self._num_missed += 1
        if self._num_missed <= MOST_MISSED:
            return RequestEnd.UNSEEN, True
        # 3. So many clients in a row do not leave: all tickets would be returned while in use.
        self._warn_once(
            "response_header_mode",
            "gateways do not report answers: response_header_mode of the external processor has to "
            "be SEND, else outcomes are unknown",
        )
        return RequestEnd.UNSEEN, False

    def outlived(self, late_s: float) -> bool:
        """Note a request that ended after its time; returns whether its time was the cause."""
        if late_s <= MOST_LATE_S:
            return late_s >= 0
        self._warn_once(
            "allow_envoy",
            "the gateway does not end requests after --request-timeout: mutation_rules of the "
            "external processor have to have allow_envoy",
        )
        return False

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned and len(self._warned) < _MOST_WARNED:
            self._warned.add(what)
            log.warning("pdconn: %s", text)
