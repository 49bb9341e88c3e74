"""Fronts that look at a connector's name: what they are given, and what vLLM makes of it.

``names`` of a record says what a front does with which name.  The configuration is the one that the
front's page shows.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from pdconn.vllm.connector import PdconnConnector

from tests.contracts.pages import configs
from tests.contracts.recorded import ROUTERS

NAMING = [name for name, router in ROUTERS.items() if "names" in router]


def resolved(names: dict[str, Any], config: KVTransferConfig) -> str | None:
    """What a front does for a connector by its name; None where it refuses it or does less.

    Of a wrapper it looks at the children, of which exactly one may be known to it.
    """
    given = [config.kv_connector]
    if config.kv_connector in names["wrappers"]:
        children = config.kv_connector_extra_config.get("connectors", [])
        given = [child["kv_connector"] for child in children]
    known = [names["known"][name] for name in given if name in names["known"]]
    return known[0] if len(known) == 1 else None


@pytest.mark.parametrize("router", NAMING)
def test_the_configuration_of_the_page_has_a_name_that_the_front_knows(router: str) -> None:
    found = configs(ROUTERS[router]["page"])
    assert found
    for config in found:
        assert resolved(ROUTERS[router]["names"], config) is not None


@pytest.mark.parametrize("router", NAMING)
def test_that_name_is_our_connector_and_keeps_the_hybrid_allocator(router: str) -> None:
    for config in configs(ROUTERS[router]["page"]):
        made = KVConnectorFactory.get_connector_class(config)
        assert issubclass(made, PdconnConnector)
        assert KVConnectorFactory.supports_hma_config(config)


@pytest.mark.parametrize("name", ["PdconnConnector", "PdConnector"])
@pytest.mark.parametrize("router", NAMING)
def test_our_own_names_are_not_known_to_it(router: str, name: str) -> None:
    """Control: what the README shows would be refused, or get less."""
    config = KVTransferConfig(
        kv_connector=name, kv_connector_module_path="pdconn.vllm", kv_role="kv_producer"
    )
    assert resolved(ROUTERS[router]["names"], config) is None


def test_dynamo_takes_our_older_name_for_its_wrapper_and_turns_the_hybrid_allocator_off() -> None:
    """``PdConnector`` is also the name of Dynamo's wrapper, which has no children here."""
    names = ROUTERS["dynamo"]["names"]
    assert re.match(r"(\w+), unless every child", names["hybrid_allocator_off_for"])[1] == (  # type: ignore[index]
        "PdConnector"
    )
    assert "PdConnector" in names["wrappers"]
    for config in configs(ROUTERS["dynamo"]["page"]):
        assert config.kv_connector != "PdConnector"


@pytest.mark.parametrize("router", NAMING)
def test_a_front_that_sets_the_side_channels_host_does_so_for_the_name(router: str) -> None:
    names = ROUTERS[router]["names"]
    for config in configs(ROUTERS[router]["page"]):
        given = {config.kv_connector}
        given |= {
            child["kv_connector"]
            for child in config.kv_connector_extra_config.get("connectors", ())
        }
        assert not names["side_channel_host_for"] or given & set(names["side_channel_host_for"])
