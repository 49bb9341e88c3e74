"""The connector's hooks, without an engine: what vLLM finds after them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.vllm.consumer import ConsumerScheduler
from tests.fakes.simulated.requests import vllm_request

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.v1.request import RequestStatus

    from pdconn.vllm.connector import PdconnConnector
    from pdconn.vllm.scheduler import PdScheduler
    from pdconn.vllm.tracing.pulls import PullSpans


def connector(role: str) -> Any:
    """As it is in the scheduler of an engine of this role, without a side channel."""
    made: Any = PdScheduler.__new__(PdScheduler)
    made._spans = PullSpans()
    made._adapters = None
    made._greeting = SimpleNamespace(weights=None, is_proven=True)
    made.weights = SimpleNamespace(computed=lambda: None)
    made._producer = made._consumer = made._store = made._answers = None
    made._loading_from_store = set()
    if role != "decode":
        made._producer = SimpleNamespace(
            unpin_freed=lambda: None, arrived=lambda request: None, finished=lambda request: None
        )
    if role != "prefill":
        made._consumer = ConsumerScheduler("here", True, False, max_model_len=2048)
    connector: Any = PdconnConnector.__new__(PdconnConnector)
    connector._worker, connector._scheduler = None, made
    return connector


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize(
    "params",
    ["text", 7, 10**5000, [[]], True, "", None, {}],
    ids=lambda params: type(params).__name__,
)
def test_vllm_finds_a_dict_or_nothing_after_a_request_arrived(role: str, params: object) -> None:
    """Its scheduler asks ``params.get`` next: anything else ended the engine."""
    side = connector(role)
    request = vllm_request(request_id="r", num_prompt_tokens=40, status=RequestStatus.RUNNING)
    request.kv_transfer_params = params
    side.on_new_request(request)
    after: Any = request.kv_transfer_params
    assert not after or isinstance(after, dict)
    assert side.request_finished_all_groups(request, ([1],)) == (False, None)
