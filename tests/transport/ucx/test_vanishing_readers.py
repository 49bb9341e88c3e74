"""Readers that vanish or hang: a lender outlives them, and holds little for them."""

from __future__ import annotations

import importlib.util
import json
import signal
import time

import numpy as np
import pytest

from tests.transport.ucx.pairs import MIB, finish, pair, until
from tests.transport.ucx.ucx_process import TCP, content, process, shuffled
from transport.types import Memory
from transport.ucx.lender_side import LenderLimits, RemoteReader, UcxLender
from transport.ucx.transport import UcxTransport

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("ucxx is not installed", allow_module_level=True)

pytestmark = [pytest.mark.ucx, pytest.mark.usefixtures("only_one_ucx")]

LIMITS = LenderLimits()


@pytest.mark.parametrize("run", [64 << 10, 4 * MIB])
def test_a_reader_that_vanishes_leaves_nothing_behind(run: int) -> None:
    nbytes = 64 * MIB
    with pair() as two:
        big = content(nbytes)
        two.lender.register([Memory(big.ctypes.data, nbytes)])
        lending = two.lender._thread.lender
        for _ in range(3):
            address = two.lender.address().hex()
            with process("read", address, big.ctypes.data, nbytes, run) as (child, _):
                assert until(lambda: lending.num_sending > 0)
                child.kill()
            assert until(lambda: lending.num_readers == 0 and lending.num_sending == 0)
        assert two.is_fine()


def test_a_reader_that_hangs_holds_a_bounded_share_and_others_go_on() -> None:
    nbytes = 64 * MIB
    with pair() as two:
        big = content(nbytes)
        two.lender.register([Memory(big.ctypes.data, nbytes)])
        lending = two.lender._thread.lender
        address = two.lender.address().hex()
        with process("read", address, big.ctypes.data, nbytes, 64 << 10) as (child, _):
            assert until(lambda: lending.num_sending > 0)
            child.send_signal(signal.SIGSTOP)
            for _ in range(20):
                assert two.is_fine()
                assert lending.num_sending <= 2 * LIMITS.sending  # its share and ours
            assert until(lambda: len(_busy(lending)) == 1), "ours has all that it asked for"
            (hung,) = _busy(lending)
            assert 0 < len(hung.sending) <= LIMITS.sending
            assert len(hung.requests) <= LIMITS.queued


def _busy(lending: UcxLender) -> list[RemoteReader]:
    return [r for r in list(lending._readers.values()) if r.requests or r.sending]


def test_a_lender_outlives_its_readers_even_where_the_environment_turns_ucxs_cache_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbytes = 16 * MIB
    monkeypatch.setenv("UCX_RCACHE_ENABLE", "n")  # read whenever a transport is made
    ours = np.full(nbytes, 255, dtype=np.uint8)
    with process("lend", nbytes) as (lender, line), UcxTransport("reader", **TCP) as reader:
        reader.register([Memory(ours.ctypes.data, nbytes)])
        address, base = json.loads(line)
        for reading_s in (0.01, 0.02, 0.05, 0.1, 0.2):  # to die connecting, and amid a message
            with process("read", address, base, nbytes, 64 << 10) as (child, _):
                time.sleep(reading_s)
                child.kill()
        spans = shuffled(ours.ctypes.data, base, nbytes, 64 << 10)
        settled = finish(reader, reader.read(reader.connect(bytes.fromhex(address)), spans))
        assert settled.ok, settled.error
        assert lender.poll() is None
