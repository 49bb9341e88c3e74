"""Which backend is opened, and what two engines hear that chose differently."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdconn.vllm.config import ConfigError, read_settings
from transport.address import pack
from transport.base import Transport
from transport.choose import WANTED, Choice, Wanted, choose, ucx_options
from transport.errors import BackendFailure, BadAddress, TransportUnavailable
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport


def runs() -> Transport:
    return InProcessTransport(InProcessNetwork(), "x")


def missing(text: str) -> Callable[[], Transport]:
    def opener() -> Transport:
        raise TransportUnavailable(text)

    return opener


@pytest.mark.parametrize(
    ("wanted", "nixl_runs", "expected"),
    [
        ("nixl", True, Choice("nixl", "as configured")),
        ("ucx", True, Choice("ucx", "as configured")),
        ("auto", True, Choice("nixl", "preferred where it runs")),
        ("auto", False, Choice("ucx", "since nixl: no plugin", ("nixl: no plugin",))),
    ],
)
def test_nixl_is_preferred_and_ucx_stands_in(
    wanted: Wanted, nixl_runs: bool, expected: Choice
) -> None:
    openers = {"nixl": runs if nixl_runs else missing("no plugin"), "ucx": runs}
    transport, choice = choose(wanted, openers)
    assert choice == expected
    transport.close()


@pytest.mark.parametrize("wanted", WANTED)
def test_where_nothing_runs_every_reason_is_given(wanted: Wanted) -> None:
    openers = {"nixl": missing("no nixl here"), "ucx": missing("no ucxx here")}
    with pytest.raises(TransportUnavailable) as caught:
        choose(wanted, openers)
    assert ("no nixl here" in str(caught.value)) == (wanted != "ucx")
    assert ("no ucxx here" in str(caught.value)) == (wanted != "nixl")


def test_a_backend_that_fails_for_another_reason_is_not_passed_over() -> None:
    def failing() -> Transport:
        raise BackendFailure("broken")

    with pytest.raises(BackendFailure, match="broken"):
        choose("auto", {"nixl": failing, "ucx": runs})


def test_the_key_is_checked_like_every_other() -> None:
    assert read_settings({}, "localhost", 5600, 0).transport == "nixl"
    for wanted in WANTED:
        assert read_settings({"transport": wanted}, "localhost", 5600, 0).transport == wanted
    for wrong in ("NIXL", "tcp", 1, None, ["nixl"], {}):
        with pytest.raises(ConfigError, match="transport: expected nixl or ucx or auto, got"):
            read_settings({"transport": wrong}, "localhost", 5600, 0)


def test_settings_for_nixl_reach_ucx_or_are_refused() -> None:
    options = {"UCX": {"engine_config": "TLS=tcp, UCX_TCP_TX_SEG_SIZE=64K"}}
    assert ucx_options(options) == {"TLS": "tcp", "TCP_TX_SEG_SIZE": "64K"}
    assert ucx_options({}) == {}
    with pytest.raises(ValueError, match=r"UCX\.num_workers"):
        ucx_options({"UCX": {"num_workers": "1"}})
    with pytest.raises(ValueError, match="not KEY=value"):
        ucx_options({"UCX": {"engine_config": "TLS=rc,cuda_copy"}})


def test_engines_that_chose_differently_hear_both_names() -> None:
    from transport.nixl.transport import NixlTransport
    from transport.ucx.transport import UcxTransport

    config = {"UCX": {"engine_config": "TLS=tcp"}}
    with (
        NixlTransport("n", backend_options=config, huge_pages=False) as nixl,
        UcxTransport("u", options={"TLS": "tcp,self"}, huge_pages=False) as ucx,
    ):
        with pytest.raises(BadAddress, match="address of backend 'nixl', ours is 'ucx'"):
            ucx.connect(nixl.address())
        with pytest.raises(BadAddress, match="address of backend 'ucx', ours is 'nixl'"):
            nixl.connect(ucx.address())
        with pytest.raises(BadAddress, match=r"address of .p.: Expected"):
            ucx.connect(pack("ucx", "p", b"garbage"))
