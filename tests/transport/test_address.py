from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import address
from transport.address import pack, unpack
from transport.errors import BadAddress


@given(name=st.text(min_size=1, max_size=256), payload=st.binary(max_size=500))
def test_an_address_comes_back_as_it_was_packed(name: str, payload: bytes) -> None:
    envelope = unpack("b", pack("b", name, payload))
    assert (envelope.name, envelope.payload) == (name, payload)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_address(garbage: bytes) -> None:
    with pytest.raises(BadAddress):
        unpack("b", garbage)


@given(data=st.data())
def test_no_single_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    good = pack("backend", "name", bytes(range(100)))
    at = data.draw(st.integers(0, len(good) - 1))
    flip = data.draw(st.integers(1, 255))
    with pytest.raises(BadAddress):
        unpack("backend", good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])


def test_another_encoding_of_the_same_number_is_noticed() -> None:
    good = pack("backend", "name", bytes(range(100)))
    assert good[117] == 0xCE, "an unsigned number of 4 bytes"
    with pytest.raises(BadAddress, match="not encoded as by pack"):
        unpack("backend", good[:117] + b"\xd2" + good[118:])


def test_the_message_shows_both_sides() -> None:
    with pytest.raises(BadAddress, match="'theirs', ours is 'ours'"):
        unpack("ours", pack("theirs", "p", b""))
    newer = msgspec.msgpack.encode(["b", address.VERSION + 1, "p", b"", 0])
    with pytest.raises(BadAddress, match=f"theirs {address.VERSION + 1}, ours {address.VERSION}"):
        unpack("b", newer)


def test_an_address_is_bounded_before_it_is_read() -> None:
    with pytest.raises(BadAddress, match="at most"):
        unpack("b", bytes(address.MAX_ADDRESS_BYTES + 1))
    with pytest.raises(BadAddress, match="at most"):
        pack("b", "p", bytes(address.MAX_ADDRESS_BYTES))
    with pytest.raises(BadAddress, match="257 characters"):
        pack("b", "x" * 257, b"")


def test_more_fields_than_expected_are_refused() -> None:
    with pytest.raises(BadAddress):
        unpack("b", msgspec.msgpack.encode(["b", address.VERSION, "p", b"", 0, "more"]))
