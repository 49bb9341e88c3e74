"""Every front has a page, the page says where its record comes from, and what it shows is taken."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdconn.vllm.config import ConfigError, read_settings
from tests.contracts.pages import BEHIND, configs, given_configs, manifests, pages
from tests.contracts.recorded import ROUTERS
from tests.project.docs.generate import DOCS, ROOT

OURS = ("pdconn.vllm", "pdconn.vllm.nixl")
PAGES = [page.name for page in pages()]
_COMMIT_LETTERS = 7


def our_settings(given: dict[str, Any]) -> None:
    """Read our part of a configuration, as an engine does; at least one must be ours."""
    extra = given.get("kv_connector_extra_config", {})
    inner = [given, *extra.get("connectors", [])]
    found = [one for one in inner if one.get("kv_connector_module_path") in OURS]
    assert found, json.dumps(given)
    for one in found:
        read_settings(one.get("kv_connector_extra_config", {}), "10.0.0.1", 5600, 0)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_page_names_the_sources_of_its_record(name: str) -> None:
    router = ROUTERS[name]
    text = (BEHIND / router["page"]).read_text(encoding="utf-8")
    for source in router["sources"]:
        if "repository" in source:
            assert source["commit"][:_COMMIT_LETTERS] in text
            assert source["repository"] in text
        else:
            assert source["version"] in text


@pytest.mark.parametrize("name", ROUTERS)
def test_a_page_says_whether_the_router_ran(name: str) -> None:
    text = (BEHIND / ROUTERS[name]["page"]).read_text(encoding="utf-8")
    assert ("**What ran**" in text) == (ROUTERS[name]["ran"] is not None)
    assert ("nothing ran" in text) == (ROUTERS[name]["ran"] is None)


@pytest.mark.parametrize("page", PAGES)
def test_the_index_and_the_menu_lead_to_the_page(page: str) -> None:
    assert f"(behind/{page})" in (DOCS / "other-routers.md").read_text(encoding="utf-8")
    assert f"behind/{page}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_record_has_a_page_and_every_page_but_lmcaches_a_record() -> None:
    recorded = {router["page"] for router in ROUTERS.values()}
    assert set(PAGES) == recorded | {"lmcache.md"}


@pytest.mark.parametrize("page", PAGES)
def test_vllm_and_we_take_the_configurations_of_the_page(page: str) -> None:
    given = given_configs(page)
    roles = [config.kv_role for config in configs(page)]
    pairs, odd = divmod(len(roles), 2)
    assert (pairs > 0, odd) == (True, 0)
    assert roles == ["kv_producer", "kv_consumer"] * pairs, "prefill, then decode"
    for one in given:
        our_settings(one)
    for decode in given[1::2]:
        assert decode["kv_load_failure_policy"] == "recompute"


def by_kserves_shell(options: str, *args: str) -> list[str]:
    """vLLM's words, as KServe's templates have a shell make them."""
    command = """eval "exec printf '%s\\n' ${VLLM_ADDITIONAL_ARGS} $@" """
    done = subprocess.run(
        ["bash", "-c", command, "--", *args],
        env={"PATH": os.environ["PATH"], "VLLM_ADDITIONAL_ARGS": options},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


def test_kserves_shell_hands_our_configuration_on_as_it_is() -> None:
    (manifest,) = (one for one in manifests("llm-d.md") if one["kind"] == "LLMInferenceService")
    spec = manifest["spec"]
    for template in (spec["prefill"]["template"], spec["template"]):
        (main,) = template["containers"]
        (options,) = (e["value"] for e in main["env"] if e["name"] == "VLLM_ADDITIONAL_ARGS")
        *_, name, text = by_kserves_shell(options)
        assert name == "--kv-transfer-config"
        our_settings(json.loads(text))
        # Control: an entry of ``args`` is read a second time, and loses its quotes.
        assert text not in by_kserves_shell("", name, text)


def test_a_key_that_is_not_ours_is_noticed() -> None:
    """Negative control."""
    [first, _] = given_configs("vllm-router.md")
    extra = {**first["kv_connector_extra_config"], "side_chanel_port": 1}
    with pytest.raises(ConfigError, match="side_chanel_port"):
        our_settings({**first, "kv_connector_extra_config": extra})


@pytest.mark.parametrize("page", PAGES)
def test_manifests_have_a_kind_and_every_engine_in_one_its_secret(page: str) -> None:
    for manifest in manifests(page):
        assert {"apiVersion", "kind", "metadata"} <= manifest.keys()
        text = json.dumps(manifest)
        assert text.count("PDCONN_SECRET_FILE") == text.count("--kv-transfer-config")
