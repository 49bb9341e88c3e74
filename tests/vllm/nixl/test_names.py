"""Which class vLLM's own factory makes of a configuration that names NixlConnector.

Some fronts know connectors by name and refuse others, and manifests hard-code the name.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.metadata import entry_points
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.utils.func_utils import supports_kw

    import pdconn.vllm
    from pdconn.vllm import connector, plugin

OURS = connector.PdconnConnector
BY_MODULE = {"kv_connector": "NixlConnector", "kv_connector_module_path": "pdconn.vllm.nixl"}
HARD_CODED = {"kv_connector": "NixlConnector"}
IN_TREE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


def transfer(**fields: Any) -> Any:
    return KVTransferConfig(kv_role="kv_both", **fields)


def made_of(**fields: Any) -> Any:
    return KVConnectorFactory.get_connector_class(transfer(**fields))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A registry of this test's own, without our names."""
    others = {
        name: load
        for name, load in KVConnectorFactory._registry.items()
        if name not in ("PdConnector", "PdconnConnector")
    }
    monkeypatch.setattr(KVConnectorFactory, "_registry", others)
    monkeypatch.delenv("PDCONN_AS_NIXL", raising=False)
    return others


def test_the_name_with_our_module_path_is_our_class() -> None:
    assert made_of(**BY_MODULE) is OURS
    assert made_of(**HARD_CODED) is not OURS, "control: vLLM's own"
    assert supports_kw(OURS, "kv_cache_config"), "or vLLM refuses it"


def test_the_name_by_module_path_keeps_the_hybrid_allocator() -> None:
    """Or hybrid models would be given memory without windows."""
    assert KVConnectorFactory.supports_hma_config(transfer(**BY_MODULE))
    both: dict[str, Any] = {"connectors": [{**BY_MODULE, "kv_role": "kv_both"}]}
    wrapped = transfer(kv_connector="MultiConnector", kv_connector_extra_config=both)
    assert MultiConnector.all_children_support_hma(wrapped)
    assert wrapped.has_connector("NixlConnector")


@pytest.mark.usefixtures("registry")
def test_a_hard_coded_name_is_our_class_if_we_are_told_to_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PDCONN_AS_NIXL", "1")
    plugin.register()
    plugin.register()  # vLLM calls it in every process, and may do so again after a fork
    assert made_of(**HARD_CODED) is OURS
    assert made_of(kv_connector="NixlPullConnector") is OURS
    assert KVConnectorFactory.get_connector_class_by_name("NixlConnector") is OURS
    assert KVConnectorFactory.supports_hma_config(transfer(**HARD_CODED))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_nothing_of_vllm_s_is_replaced_without_being_told(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv("PDCONN_AS_NIXL", value)
    plugin.register()
    assert made_of(**HARD_CODED).__module__.startswith(IN_TREE)


@pytest.mark.usefixtures("registry")
def test_the_connector_that_pushes_and_all_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(KVConnectorFactory._registry)
    monkeypatch.setenv("PDCONN_AS_NIXL", "1")
    plugin.register()
    after = KVConnectorFactory._registry
    changed = {name for name in after if after[name] is not before.get(name)}
    assert changed == {"NixlConnector", "NixlPullConnector", "PdConnector", "PdconnConnector"}
    assert before.keys() <= after.keys()


@pytest.mark.usefixtures("registry")
def test_our_class_has_a_name_of_its_own_and_keeps_the_older_one() -> None:
    plugin.register()
    for name in ("PdconnConnector", "PdConnector"):
        assert made_of(kv_connector=name) is OURS
        assert made_of(kv_connector=name, kv_connector_module_path="pdconn.vllm") is OURS
        assert getattr(connector, name) is getattr(pdconn.vllm, name) is OURS
    assert OURS.__name__ == "PdconnConnector"
    with pytest.raises(AttributeError, match="PdconnConector"):
        made_of(kv_connector="PdconnConector", kv_connector_module_path="pdconn.vllm")


def test_a_name_that_another_plugin_has_taken_is_left_to_it(registry: dict[str, Any]) -> None:
    """Dynamo's wrapper is called PdConnector."""
    registry["PdConnector"] = theirs = lambda: MultiConnector
    plugin.register()
    assert KVConnectorFactory._registry["PdConnector"] is theirs
    assert made_of(kv_connector="PdconnConnector") is OURS


def test_vllm_finds_the_entry_point() -> None:
    (ours,) = entry_points(group="vllm.general_plugins", name="pdconn")
    assert ours.value == f"{plugin.register.__module__}:{plugin.register.__name__}"


def test_asking_for_the_module_imports_no_vllm() -> None:
    """Tools look at a module path without a machine that has vLLM."""
    code = (
        "import sys, pdconn.vllm.nixl as found; loaded = {m.split('.')[0] for m in sys.modules}; "
        "print(found.__all__, loaded & {'vllm', 'torch'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "['NixlConnector'] set()"
