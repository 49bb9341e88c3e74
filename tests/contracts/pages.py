"""Pages of ``docs/behind``: the configurations and manifests that they show."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig

from tests.project.docs.generate import DOCS

BEHIND = DOCS / "behind"
_FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """One per front."""
    return sorted(BEHIND.glob("*.md"))


def fences(page: str, language: str) -> list[str]:
    """A page's fences of one language."""
    text = (BEHIND / page).read_text(encoding="utf-8")
    return [found["text"] for found in _FENCE.finditer(text) if found["language"] == language]


def manifests(page: str) -> list[dict[str, Any]]:
    """Every document of a page's YAML."""
    return [
        document
        for text in fences(page, "yaml")
        for document in yaml.safe_load_all(text)
        if document is not None
    ]


def given_configs(page: str) -> list[dict[str, Any]]:
    """Every ``--kv-transfer-config`` of a page, in YAML, shell and JSON alike."""
    found: list[dict[str, Any]] = []
    for manifest in manifests(page):
        found += _within(manifest)
    for language in ("sh", "json"):
        for text in fences(page, language):
            found += list(_objects(text))
    return found


def configs(page: str) -> list[KVTransferConfig]:
    """The same, as vLLM reads them."""
    return [KVTransferConfig(**given) for given in given_configs(page)]


def _within(value: Any) -> list[dict[str, Any]]:
    """Configurations in a manifest: as JSON within an argument, or as YAML."""
    if isinstance(value, str):
        return list(_objects(value))
    if isinstance(value, dict) and "kv_connector" in value:
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for inner in inside for one in _within(inner)]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects that begin with ``kv_connector``; those inside one of them are its own."""
    decoder, end = json.JSONDecoder(), 0
    for found in re.finditer(r"\{\s*\"kv_connector\"", text):
        if found.start() >= end:
            made, end = decoder.raw_decode(text, found.start())
            if "kv_role" in made:  # else a label of that name
                yield made
