"""Engines for the tests in this folder, each configuration started once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pdconn.lab.engine import Engine
from pdconn.lab.model import write_model
from tests.vllm.engines.engines import (
    CONFIGURATIONS,
    SPOILED_BESIDE,
    Configuration,
    Expected,
    PdPair,
    all_at_once,
    alone,
    cache_beside,
    engine,
    one_after_another,
    pair_of,
    pairing_prompts,
    whole_blocks,
)


def pytest_configure(config: pytest.Config) -> None:
    """Our marker."""
    config.addinivalue_line("markers", "only(**fields): run in configurations with these fields")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything here starts engines; what is not for a configuration is not selected for it."""
    here = Path(__file__).parent
    left_out = []
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.timeout(900))
        only = item.get_closest_marker("only")
        if only is not None and not _meant(item, only.kwargs):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    # The pairs live until the end of the session, so whoever needs more engines is first.
    first = ("test_topology", "test_bench_serve")
    items.sort(key=lambda item: here in item.path.parents and item.path.stem not in first)


def _meant(item: pytest.Item, fields: Mapping[str, object]) -> bool:
    configuration = item.callspec.params["pair"]  # type: ignore[attr-defined]
    return all(getattr(configuration, name) == value for name, value in fields.items())


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def model(work: Path) -> Path:
    return write_model(work)


@pytest.fixture(scope="session")
def misconfigured(model: Path, work: Path) -> Iterator[Engine]:
    """Started, and not waited for: an engine with a key that nobody knows."""
    configuration = Configuration("LBHNC", False, one_process=True, policy="fail")
    spec = engine("wrong", model, configuration, "kv_consumer", 0, side_channel_prot=1)
    wrong = Engine(spec, work, cache=cache_beside(model))
    wrong.launch()
    yield wrong
    wrong.stop()


@pytest.fixture(scope="session")
def expected(model: Path, work: Path, misconfigured: Engine) -> Expected:
    """What one engine alone says to every prompt of these tests."""
    del misconfigured  # it fails on the core that the single engine leaves idle
    pairings = [prompt for n in range(10) for part in pairing_prompts(n) for prompt in part]
    prompts = [*one_after_another(), *all_at_once(), *whole_blocks(), *pairings]
    with alone(model, work) as client:
        return Expected(client, prompts)


@pytest.fixture(scope="session", params=CONFIGURATIONS, ids=str)
def pair(
    request: pytest.FixtureRequest, model: Path, work: Path, expected: Expected
) -> Iterator[PdPair]:
    """A pair in each configuration in turn."""
    del expected  # its engine must be gone first
    configuration: Configuration = request.param
    others = {}
    if configuration == SPOILED_BESIDE:
        faults = {"reads": {"corrupt": 1.0}}
        for name, verify in (("spoiled", "off"), ("doubting", "always")):
            others[name] = engine(
                name, model, configuration, "kv_consumer", 1, verify=verify, debug_faults=faults
            )
    with pair_of(configuration, model, work / str(configuration), others) as started:
        yield started
