"""The engines of a pick, behind a real Envoy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from multidict import CIMultiDict

from pdconn.router.picker.exchange import Exchange
from pdconn.router.routing.decide import RequestRouter
from pdconn.router.routing.policy import Candidate
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop
from tests.router.picker.gateway import Filter, behind_envoy

RANK = "X-data-parallel-rank"


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ((None, None, None), (0, 1, 2)),
        ((1, None, 1), (0, 2)),
        ((1, 0, 2), (0,)),
        ((None, 3, 1), (0, 1, 2)),  # each engine chooses
    ],
)
@in_loop
async def test_a_rank_is_sent_to_engines_alone_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[int | None, ...],
    named: tuple[int, ...],
) -> None:
    """The gateway sends the second engine of a pick the same headers as the first one."""
    picked: list[tuple[str | None, list[str]]] = []
    send = Exchange.send_pick

    async def noting(
        self: Exchange, headers: CIMultiDict[str], body: bytes | None, endpoints: Iterable[str]
    ) -> None:
        picked.append((headers.get(RANK), list(endpoints)))
        await send(self, headers, body, endpoints)

    monkeypatch.setattr(Exchange, "send_pick", noting)
    async with deployment(num_decode=3, running=behind_envoy(Filter())) as d:
        by_engine = {engine.url: rank for engine, rank in zip(d.decode, ranks, strict=True)}

        def candidate(self: RequestRouter, engine: str, lookup: Any, loads: Any) -> Candidate:
            return Candidate(engine, rank=by_engine.get(engine))

        monkeypatch.setattr(RequestRouter, "_candidate", candidate)
        assert (await d.complete()).status == 200
        rank = None if ranks[0] is None else str(ranks[0])
        wanted = [d.decode[number].url.removeprefix("http://") for number in named]
        assert picked == [(rank, wanted)]
        assert d.decode[0].seen[0].headers.get(RANK) == rank
