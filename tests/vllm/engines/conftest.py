"""Engines for the tests in this folder, each configuration started once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.model import write_model
from tests.vllm.engines.engines import (
    CONFIGURATIONS,
    CORRUPTED_BESIDE,
    WIDE_BESIDE,
    Configuration,
    Expected,
    PdPair,
    alone,
    engine,
    pair_of,
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
    # The last pair lives until the end of the session, so the tests that start more engines
    # are first.
    items.sort(key=lambda item: here in item.path.parents and "pair" in _fixtures(item))


def _fixtures(item: pytest.Item) -> Collection[str]:
    return getattr(item, "fixturenames", ())


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
def started_alone(model: Path, work: Path) -> Iterator[tuple[Engine, Engine]]:
    """An engine without a connector, and one with an unknown key that ends by itself."""
    configuration = Configuration("LBHNC", False, one_process=True, policy="fail")
    wrong = engine("wrong", model, configuration, "kv_consumer", 0, side_channel_prot=1)
    with alone(model, work, wrong) as engines:
        yield engines


@pytest.fixture(scope="session")
def misconfigured(started_alone: tuple[Engine, Engine]) -> Engine:
    """Launched, and not waited for: an engine with an unknown key."""
    return started_alone[1]


@pytest.fixture(scope="session")
def expected(started_alone: tuple[Engine, Engine]) -> Expected:
    """What one engine alone answers."""
    return Expected(Client(started_alone[0].url))


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(c, id=str(c), marks=[pytest.mark.matrix] if c.matrix else [])
        for c in CONFIGURATIONS
    ],
)
def pair(
    request: pytest.FixtureRequest, model: Path, work: Path, expected: Expected
) -> Iterator[PdPair]:
    """A pair in each configuration in turn."""
    del expected  # its engine starts first
    configuration: Configuration = request.param
    others = {}
    if configuration == CORRUPTED_BESIDE:
        faults = {"reads": {"corrupt": 1.0}}
        for name, verify in (("trusting", "off"), ("verifying", "always")):
            others[name] = engine(
                name, model, configuration, "kv_consumer", 1, verify=verify, debug_faults=faults
            )
    if configuration == WIDE_BESIDE:
        others["wide"] = engine("wide", model, configuration, "kv_both", 0, ranks=2)
    with pair_of(configuration, model, work / str(configuration), others) as started:
        yield started
