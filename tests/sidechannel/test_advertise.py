"""Which host tickets name, by where the side channel listens and what is known of the machine."""

from __future__ import annotations

import socket

import pytest

from pdconn.sidechannel.advertise import (
    NoAdvertisedHost,
    advertised_host,
    is_wildcard,
    own_addresses,
)

POD = {"POD_IP": "10.1.2.3"}
POD_6 = {"POD_IP": "fd00::3"}
HOST = {"VLLM_HOST_IP": "10.9.9.9"}
DEBIAN = ["127.0.1.1"]


def never() -> list[str]:
    raise AssertionError("the machine's name was looked up")


@pytest.mark.parametrize("bound", ["10.0.0.1", "localhost", "prefill-0", "127.0.0.1", "fd00::1"])
def test_an_address_to_listen_at_is_the_one_that_tickets_name(bound: str) -> None:
    assert advertised_host(bound, None, {**POD, **HOST}, never) == bound


@pytest.mark.parametrize("bound", ["10.0.0.1", "0.0.0.0", "::", "127.0.0.1"])
def test_what_the_user_gives_goes_first(bound: str) -> None:
    assert (
        advertised_host(bound, "prefill-0.example", {**POD, **HOST}, never) == "prefill-0.example"
    )


@pytest.mark.parametrize(
    ("bound", "environ", "addresses", "expected"),
    [
        ("0.0.0.0", {**POD, **HOST}, ["10.7.7.7"], "10.1.2.3"),
        ("0.0.0.0", HOST, ["10.7.7.7"], "10.9.9.9"),
        ("0.0.0.0", {"POD_IP": ""}, ["10.7.7.7"], "10.7.7.7"),
        ("0.0.0.0", {}, ["127.0.1.1", "fd00::7", "10.7.7.7"], "10.7.7.7"),
        ("::", POD_6, [], "fd00::3"),
        ("::", POD, [], "10.1.2.3"),
        ("::", {}, ["::1", "fe80::1%eth0", "fd00::7", "10.7.7.7"], "fd00::7"),
        ("0::0", POD_6, [], "fd00::3"),
        ("0", POD, [], "10.1.2.3"),
    ],
)
def test_of_every_address_the_pod_s_is_named_then_the_machine_s(
    bound: str, environ: dict[str, str], addresses: list[str], expected: str
) -> None:
    assert advertised_host(bound, None, environ, lambda: addresses) == expected


@pytest.mark.parametrize(
    ("bound", "addresses"),
    [("0.0.0.0", DEBIAN), ("::", [*DEBIAN, "::1"]), ("0.0.0.0", []), ("0.0.0.0", ["fd00::7"])],
)
def test_loopback_is_never_guessed(bound: str, addresses: list[str]) -> None:
    """Its tickets would send each decode engine to its own machine."""
    with pytest.raises(NoAdvertisedHost) as caught:
        advertised_host(bound, None, {}, lambda: addresses)
    error = caught.value
    assert error.field == "advertise_host"
    assert f"side_channel_host is {bound}" in str(error.expected)
    assert ", ".join(addresses) in str(error.seen)
    assert "POD_IP" in error.hint


@pytest.mark.parametrize(
    ("bound", "given", "environ", "text"),
    [
        ("10.0.0.1", "0.0.0.0", {}, "advertise_host: expected a host .* can dial, got '0.0.0.0'"),
        ("::", "::", POD, "advertise_host: expected a host .* can dial, got '::'"),
        ("0.0.0.0", None, {"POD_IP": "pod-7"}, "POD_IP: expected an address, got 'pod-7'"),
        ("0.0.0.0", None, {"VLLM_HOST_IP": "0.0.0.0"}, "VLLM_HOST_IP: expected an address that"),
        ("0.0.0.0", None, POD_6, "POD_IP: expected an IPv4 address, got 'fd00::3'; set side_ch"),
    ],
)
def test_a_host_that_cannot_be_dialled_is_refused(
    bound: str, given: str | None, environ: dict[str, str], text: str
) -> None:
    with pytest.raises(NoAdvertisedHost, match=text):
        advertised_host(bound, given, environ, never)


def test_a_name_is_no_wildcard_and_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = socket.getaddrinfo

    def noted(host: str, *args: object, flags: int = 0) -> object:
        asked.append(flags)
        return real(host, *args, flags=flags)  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    assert not is_wildcard("prefill-0.invalid")
    assert is_wildcard("0.0.0.0")
    assert asked == [socket.AI_NUMERICHOST] * 2


def test_a_machine_whose_name_leads_nowhere_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert own_addresses() == []
