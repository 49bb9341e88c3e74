"""The field by which a request says that nobody waits for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdconn.protocol.errors import TicketError
from pdconn.protocol.keep import is_prefetch
from pdconn.vllm import prompt


@pytest.mark.parametrize("params", [None, {}, {"pdconn": None}, {"pdconn": {"prefetch": False}}])
def test_a_request_is_waited_for_unless_it_says_otherwise(params: object) -> None:
    assert not is_prefetch(params)
    assert is_prefetch({"pdconn": {"prefetch": True}})


@pytest.mark.parametrize("bad", [1, "true", None, [], {}])
def test_another_value_is_an_error_and_the_request_is_waited_for(
    bad: object, caplog: pytest.LogCaptureFixture
) -> None:
    params = {"pdconn": {"prefetch": bad}}
    with pytest.raises(TicketError, match=r"pdconn\.prefetch: expected true or false, got"):
        is_prefetch(params)
    request = SimpleNamespace(kv_transfer_params=params, request_id="r")
    assert not prompt.is_prefetch(request)
    assert "pdconn.prefetch: expected true or false" in caplog.text
