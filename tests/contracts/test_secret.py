"""Routers that write a host of their own into the ticket, where engines share a secret.

Both sides prove that they know the secret *and* which host and port they mean, so that a forged
ticket cannot have a handshake relayed.  The host that a router writes has to be the one that
prefill advertises, or the address at which the connection comes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pdconn.protocol.auth import Secret
from pdconn.sidechannel.connection import Unauthenticated
from pdconn.sidechannel.security import Security
from tests.contracts.engines import COMPLETIONS, HOST, Engine, claim, engines
from tests.contracts.recorded import MODES, Mode
from tests.contracts.test_routers import CLIENTS

OVERWRITING = [one for one in MODES if "$prefill_host" in one.decode["sets"].values()]
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    file: Path = tmp_path_factory.mktemp("secret") / "pdconn.secret"
    file.touch(0o600)
    file.write_text(SECRET, encoding="utf-8")
    with engines(secret_file=str(file)) as made:
        yield made


def by_way_of(mode: Mode, pair: tuple[Engine, Engine], host: str) -> None:
    """Hand a request over behind a router that knows prefill by ``host``, and claim it."""
    answer = pair[0].prefill(COMPLETIONS, mode.prefill_body(CLIENTS[COMPLETIONS]))
    body = mode.decode_body(CLIENTS[COMPLETIONS], answer, host)
    ticket = pair[1].decode(COMPLETIONS, body).ticket
    assert ticket.host == host
    claim(ticket, Security(Secret(SECRET.encode())))


def test_there_are_routers_that_overwrite_the_host() -> None:
    assert {mode.router for mode in OVERWRITING} == {"production-stack", "aibrix"}


@pytest.mark.parametrize("mode", OVERWRITING, ids=str)
def test_the_address_that_prefill_gives_itself_is_taken(
    pair: tuple[Engine, Engine], mode: Mode
) -> None:
    by_way_of(mode, pair, HOST)


@pytest.mark.parametrize("mode", OVERWRITING, ids=str)
def test_another_name_of_the_same_host_is_not(pair: tuple[Engine, Engine], mode: Mode) -> None:
    """``test_routers`` has the control: without a secret it is."""
    with pytest.raises(Unauthenticated):
        by_way_of(mode, pair, "localhost")
