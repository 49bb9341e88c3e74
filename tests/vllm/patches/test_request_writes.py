"""Our fake of a request is no kinder than vLLM's."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from pdconn.vllm.patches.request_writes import NEEDED
    from tests.fakes.simulated.requests import vllm_request


def test_our_fake_of_a_request_has_what_vllms_has() -> None:
    """Of what decides: one that had less was read by a default."""
    real = Request("r", [1, 2], SamplingParams(max_tokens=1), None)
    fake = vars(vllm_request())
    assert set(fake) == NEEDED
    assert {name: getattr(real, name) for name in fake} == fake
