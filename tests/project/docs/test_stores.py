"""What ``docs/stores.md`` tells a user to copy is accepted, and every setting is explained."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from pdconn.store.settings import StoreSettings
from pdconn.tools.cli.main import build_parser
from pdconn.vllm.config import ConfigError, read_settings
from tests.project.docs.generate import DOCS
from tests.project.docs.store_settings import MEANINGS, rows

PAGE = (DOCS / "stores.md").read_text(encoding="utf-8")


def configurations(text: str) -> Iterator[dict[str, Any]]:
    """Every ``--kv-transfer-config`` of a page."""
    for found in re.findall(r"--kv-transfer-config '(\{.*?\})'\n", text, re.DOTALL):
        yield json.loads(found)


def test_configurations_to_copy_have_a_store_and_are_read() -> None:
    found = list(configurations(PAGE))
    assert [one["kv_role"] for one in found] == ["kv_both", "kv_producer", "kv_consumer", "kv_both"]
    stores = []
    for one in found:
        extra = {**one["kv_connector_extra_config"], "insecure": True}
        settings = read_settings(extra, "localhost", 5600, 0, {})
        assert settings.store is not None
        stores.append((settings.store.root, settings.store.capacity))
    assert set(stores) == {("/mnt/kv", 200 << 30), ("/var/lib/kv", 2 << 40)}


def test_a_configuration_with_a_typo_is_noticed() -> None:
    """Negative control."""
    (wrong,) = configurations('--kv-transfer-config \'{"store": {"rot": "/mnt/kv"}}\'\n')
    with pytest.raises(ConfigError, match="did you mean 'root'"):
        read_settings(wrong, "localhost", 5600, 0, {})


def test_commands_to_copy_are_parsed() -> None:
    block = PAGE.partition("## Commands")[2].partition("```text\n")[2].partition("```")[0]
    lines = [line.split("  ")[0] for line in block.splitlines()]
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line)[1:]
        build_parser("store").parse_args(words)


def test_every_setting_is_explained() -> None:
    assert list(MEANINGS) == [field.name for field in fields(StoreSettings)]
    assert all(takes and meaning for _, takes, _, meaning in rows())
