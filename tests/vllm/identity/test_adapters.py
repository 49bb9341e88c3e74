"""An adapter is its files: tickets carry their digest, and a name given anew is another one."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.protocol.errors import TicketError
from pdconn.protocol.ticket import BlockList, Ticket, parse_ticket
from pdconn.vllm.identity.adapters import NO_ADAPTER, PATIENCE_S, Adapter, AdapterReader
from pdconn.vllm.prompt import prompt_digest
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulling import Pulling
from tests.fakes.simulated.hooks import finished, matched
from tests.fakes.simulated.requests import vllm_request

PROMPT = list(range(100, 140))


class Disk:
    """Digests of adapters by path, read when the test lets them be."""

    def __init__(self, **files: str | None) -> None:
        self.files, self.now = files, 100.0
        self._allowed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.reader = AdapterReader(self._read, lambda: self.now)

    def _read(self, lora: Any) -> str | None:
        self._allowed.get()
        return self.files[lora.lora_path]

    def allow(self) -> None:
        self._allowed.put(None)

    def settle(self, asked: Any) -> Adapter:
        """Once the thread has answered."""
        self.allow()
        return until(lambda: self.reader.adapter_of(asked), lambda found: found.is_read)


def until(ask: Callable[[], Adapter], is_it: Callable[[Adapter], bool]) -> Adapter:
    give_up = time.monotonic() + 10
    while not is_it(found := ask()) and time.monotonic() < give_up:
        time.sleep(0.001)
    return found


def request(path: str | None = "a", name: str = "d", **changes: Any) -> Any:
    lora = None if path is None else SimpleNamespace(lora_name="tuned", lora_path=path)
    made = vllm_request(
        request_id=name, prompt_token_ids=list(PROMPT), num_prompt_tokens=len(PROMPT),
        num_tokens=len(PROMPT), lora_request=lora, mm_features=[],
    )  # fmt: skip
    vars(made).update(changes)
    return made


def ticket(adapter: str) -> Ticket:
    blocks = (BlockList(0, (7, 8, 9)),)
    digest = prompt_digest(request())
    return Ticket("p", "boot", "r", "localhost", 5600, 40, digest, blocks, adapter=adapter)


# The reader


def test_nothing_waits_for_files_and_what_was_read_is_known() -> None:
    disk, asked = Disk(a="digest"), request()
    disk.reader.read_adapter_of(asked)
    assert disk.reader.adapter_of(asked) == Adapter(None, is_read=False)
    with pytest.raises(TicketError, match=r"pdconn\.adapter: expected one whose files are known"):
        disk.reader.proof_of(asked)
    assert disk.settle(asked) == Adapter("digest")
    assert disk.reader.proof_of(asked) == "digest"
    assert disk.reader.adapter_of(request(None)) == NO_ADAPTER
    assert disk.reader.proof_of(request(None)) == ""


def test_a_file_system_that_does_not_answer_costs_an_adapter_and_no_more() -> None:
    disk, asked = Disk(a="digest"), request()
    disk.reader.read_adapter_of(asked)
    disk.now += PATIENCE_S
    assert not disk.reader.adapter_of(asked).is_read
    disk.now += 0.1
    assert disk.reader.adapter_of(asked) == Adapter(None)
    assert disk.settle(asked).is_read
    assert until(lambda: disk.reader.adapter_of(asked), lambda a: a.digest is not None).digest


def test_each_request_has_its_adapter_looked_at_again() -> None:
    """By then its files may have changed under the engine, which is not known then."""
    disk = Disk(a="digest")
    disk.reader.read_adapter_of(request())
    disk.settle(request())
    disk.files["a"] = None
    disk.reader.read_adapter_of(request())
    assert disk.reader.adapter_of(request()) == Adapter("digest"), "what was loaded"
    disk.allow()
    found = until(lambda: disk.reader.adapter_of(request()), lambda found: found.digest is None)
    assert found == Adapter(None)


def test_a_request_that_never_arrived_has_no_known_adapter() -> None:
    assert Disk().reader.adapter_of(request()) == Adapter(None)


# The ticket


def test_a_ticket_carries_the_digest_and_nobody_can_change_it() -> None:
    made = ticket("digest")
    assert parse_ticket(made.to_params(1, 1)) == made
    digests = {each.digest() for each in (made, ticket("other"), ticket(""))}
    assert len(digests) == 3
    params = made.to_params(1, 1)
    del params["pdconn"]["adapter"]
    assert parse_ticket(params).digest() == ticket("").digest()


def test_a_ticket_without_an_adapter_is_the_one_of_before() -> None:
    assert "adapter" not in ticket("").to_params(1, 1)["pdconn"]


@pytest.mark.parametrize("adapter", ["x" * 513, "a\nb", 7, None, ["x"]])
def test_what_is_no_digest_is_refused(adapter: Any) -> None:
    params = ticket("").to_params(1, 1)
    params["pdconn"]["adapter"] = adapter
    with pytest.raises(TicketError, match=r"pdconn\.adapter"):
        parse_ticket(params)


# Decode


def consumer(disk: Disk | None, recompute: bool = False) -> Pulling:
    made = Pulling(PullRules("here", recompute, False, max_model_len=1000))
    made.adapters = None if disk is None else disk.reader
    return made


def arrives(side: Pulling, disk: Disk | None, asked: Any, of: Ticket) -> None:
    asked.kv_transfer_params = of.to_params(1, 1)
    if disk is not None:
        disk.reader.read_adapter_of(asked)
    side.on_new_request(asked)


@pytest.mark.parametrize("recompute", [False, True])
def test_decode_pulls_for_the_adapter_that_prefill_had_once_it_knows(recompute: bool) -> None:
    disk, asked = Disk(a="digest"), request()
    side = consumer(disk, recompute)
    arrives(side, disk, asked, ticket("digest"))
    assert matched(side, asked, 0) == (None, False)
    assert side.pulled_until(asked) == 0
    disk.settle(asked)
    assert matched(side, asked, 0) == (39, True)
    assert side.pulled_until(asked) == 39


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("old", "new"), ("old", None), ("", "new")],
    ids=["other", "ours", "theirs"],
)
def test_decode_computes_for_another_adapter_of_the_name_and_for_one_that_is_not_known(
    theirs: str, ours: str | None, recompute: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """No request fails: prefill is not wrong, and nor is the client."""
    disk, asked = Disk(a=ours), request()
    side = consumer(disk, recompute)
    arrives(side, disk, asked, ticket(theirs))
    disk.settle(asked)
    assert matched(side, asked, 0) == (0, False)
    assert side.take_counts() == {"tickets_gone": 1}
    [line] = caplog.messages
    assert f"adapter: theirs {theirs or 'not known'}, ours {ours or 'not known'}" in line
    finished(side, asked)
    assert len(side) == 0


def test_where_peers_are_not_compared_a_name_is_an_adapter() -> None:
    """``enforce_handshake_compat: false``."""
    side, asked = consumer(None), request()
    arrives(side, None, asked, ticket("old"))
    assert matched(side, asked, 0) == (39, True)


def test_a_prompt_without_an_adapter_waits_for_nothing() -> None:
    disk, asked = Disk(), request(None)
    side = consumer(disk)
    digest = prompt_digest(asked)
    arrives(side, disk, asked, replace(ticket(""), prompt=digest))
    assert matched(side, asked, 0) == (39, True)
