"""Engines are named by their addresses, all of them, and a name server that fails costs little."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from pdconn.router.picker.endpoints import FAILED_FOR_S, FOR_S, MOST_NAMED, Endpoints
from tests.fakes.event_loop import in_loop

A, B = "http://a:8000", "http://b:8001"


class Names:
    """A name server; ``asked``: the names, in order; ``gate`` holds its answers back."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    async def look_up(self, host: str, port: int) -> Iterable[str]:
        self.asked.append(host)
        await self.gate.wait()
        if host not in self.addresses:
            raise OSError("no such name")
        return self.addresses[host]

    def endpoints(self, look_up_s: float = 60.0) -> Endpoints:
        return Endpoints(self.look_up, self.clock, look_up_s)


@in_loop
async def test_all_addresses_are_named_in_order_up_to_the_most_of_a_pick() -> None:
    names = Names(a=["10.0.0.1", "fd00::1", "10.0.0.1"], b=["10.0.0.2", "10.0.0.3"])
    found, failures = await names.endpoints().resolve([A, B])
    assert found == {"10.0.0.1:8000": A, "[fd00::1]:8000": A, "10.0.0.2:8001": B}
    assert (len(found), failures) == (MOST_NAMED, [])


@in_loop
async def test_a_name_that_is_unknown_is_not_looked_up_for_each_request() -> None:
    names = Names(b=["10.0.0.2"])
    endpoints = names.endpoints()
    for _ in range(9):
        found, failures = await endpoints.resolve([A, B])
        assert found == {"10.0.0.2:8001": B}
        assert [(one.engine, one.why) for one in failures] == [(A, "no such name")]
    assert names.asked == ["a", "b"]
    names.now_s += FAILED_FOR_S
    names.addresses["a"] = ["10.0.0.1"]
    assert len((await endpoints.resolve([A, B]))[0]) == 2  # and not for long
    assert names.asked == ["a", "b", "a"]


@in_loop
async def test_addresses_are_looked_up_again() -> None:
    names = Names(a=["10.0.0.1"])
    endpoints = names.endpoints()
    await endpoints.resolve([A])
    names.addresses["a"] = ["10.0.0.9"]
    assert list((await endpoints.resolve([A]))[0]) == ["10.0.0.1:8000"]
    names.now_s += FOR_S
    assert list((await endpoints.resolve([A]))[0]) == ["10.0.0.9:8000"]


@in_loop
async def test_a_name_server_that_is_silent_is_asked_once_and_waited_for_briefly() -> None:
    names = Names(a=["10.0.0.1"])
    names.gate.clear()
    endpoints = names.endpoints(look_up_s=0.05)
    async with asyncio.timeout(10):
        every = await asyncio.gather(*(endpoints.resolve([A]) for _ in range(5)))
    assert [(found, failures[0].why) for found, failures in every] == [
        ({}, "no address within 0.05 s")
    ] * 5
    names.now_s += FAILED_FOR_S
    await endpoints.resolve([A])
    assert names.asked == ["a"]  # its thread cannot be stopped
    names.gate.set()
    names.now_s += FAILED_FOR_S
    assert list((await endpoints.resolve([A]))[0]) == ["10.0.0.1:8000"]
    endpoints.close()


@pytest.mark.parametrize(
    ("engine", "why"),
    [("http://10.0.0.1/v", "path"), ("http://a:1", "no such name")],
)
@in_loop
async def test_an_engine_without_an_endpoint_is_named_with_the_reason(
    engine: str, why: str
) -> None:
    found, (failure,) = await Names().endpoints().resolve([engine])
    assert (found, failure.engine) == ({}, engine)
    assert why in failure.why


@in_loop
async def test_only_endpoints_of_the_subset_are_named() -> None:
    names = Names(a=["10.0.0.1", "10.0.0.2"], b=["10.0.0.3"])
    endpoints, subset = names.endpoints(), frozenset({"10.0.0.2:8000"})
    found, (failure,) = await endpoints.resolve([A, B], subset)
    assert (found, failure.engine) == ({"10.0.0.2:8000": A}, B)
    assert await endpoints.within([A, B], subset) == {A}
    assert await endpoints.within([A, B], frozenset()) == frozenset()
    assert (await endpoints.resolve([A, B], frozenset()))[0] == {}
    literal = "http://10.0.0.4:1"
    assert endpoints.engine_at("10.0.0.3:8001", [A, B]) == B
    assert endpoints.engine_at("10.0.0.4:1", [A, literal]) == literal
    assert endpoints.engine_at("10.0.0.5:1", [A, B, literal]) is None
