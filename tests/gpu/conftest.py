"""A lender per device: host memory always, so that these tests are tested; VRAM where it is."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.gpu.rigs import DeviceLender
from transport import Device

collect_ignore_glob = [] if importlib.util.find_spec("nixl") else ["test_*.py"]


def has_gpu() -> bool:
    """Whether there is a card that torch can use."""
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """Where KV memory lies, on both sides."""
    if request.param == "cuda" and not has_gpu():
        pytest.skip("no GPU here")
    return Device(request.param)


@pytest.fixture(scope="session")
def lender(device: Device) -> Iterator[DeviceLender]:
    """The other process."""
    lender = DeviceLender(device)
    yield lender
    lender.end()
