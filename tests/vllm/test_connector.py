"""The connector's hooks, without an engine: what vLLM finds after them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.fakes.simulated.hooks import half_of
from tests.fakes.simulated.requests import vllm_request

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.v1.request import RequestStatus

    from pdconn.vllm.config import read_settings
    from pdconn.vllm.connector import PdconnConnector
    from pdconn.vllm.lends.lending import Lending
    from pdconn.vllm.pulls.pull_rules import PullRules
    from pdconn.vllm.pulls.pulling import Pulling
    from pdconn.vllm.scheduler import SchedulerParts


def connector(role: str) -> Any:
    """As it is in the scheduler of an engine of this role, without a side channel."""
    settings = read_settings({}, "127.0.0.1", 1, 0)
    lending = None if role == "decode" else Lending(settings, "e", "here", (1, 1))
    rules = PullRules("here", True, False, max_model_len=2048)
    pulling = None if role == "prefill" else Pulling(rules)
    connector: Any = PdconnConnector.__new__(PdconnConnector)
    connector._worker = None
    connector._scheduler = half_of(SchedulerParts(lending=lending, pulling=pulling))
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
