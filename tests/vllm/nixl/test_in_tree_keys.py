"""NixlConnector's keys in ``kv_connector_extra_config``: each is taken over, or answered.

The table is compared with the source of the installed vLLM, so that a key that it adds is noticed.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pdconn.vllm.config import (
    KEYS,
    ConfigError,
    LendBack,
    Settings,
    in_our_keys,
    read_layout,
    read_settings,
)
from pdconn.vllm.nixl.in_tree_keys import ANSWER_TTL_S, IN_TREE_KEYS, translate
from tests.vllm.test_supported import config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from pdconn.vllm.supported import answer_in_tree_keys

NO_DEFAULT = object()
RETIRED = {"enable_cross_layers_blocks"}
"""Read by NixlConnector before vLLM 0.32, and still in manifests."""

SHARED = {key.name for key in KEYS if key.in_tree == "the same key"}
OWN = {key.name for key in KEYS}
TABLE = {key.name: key for key in IN_TREE_KEYS}


def sources() -> str:
    """All of vLLM's in-tree connector."""
    spec = find_spec("vllm.distributed.kv_transfer.kv_connector.v1.nixl")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.py")))


def keys_read(source: str) -> Iterator[tuple[str, object]]:
    """Keys of ``kv_connector_extra_config`` that ``source`` reads, with their literal defaults."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            is_read = node.func.attr == "get_from_extra_config" or (
                node.func.attr in ("get", "pop", "setdefault")
                and isinstance(of, ast.Attribute | ast.Name)
                and getattr(of, "attr", getattr(of, "id", "")).endswith("extra_config")
            )
            if is_read:
                given = [_literal(one) for one in node.args]
                yield str(given[0]), given[1] if len(given) > 1 else None
        elif isinstance(node, ast.Subscript):
            of = node.value
            if getattr(of, "attr", getattr(of, "id", "")).endswith("extra_config"):
                yield str(_literal(node.slice)), NO_DEFAULT


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NO_DEFAULT


def settings(extra: dict[str, Any], role: str = "kv_both") -> Settings:
    return read_settings(extra, "127.0.0.1", 5600, 0, {}, role=role)


def notes(extra: dict[str, Any], role: str = "kv_both") -> tuple[str, ...]:
    return in_our_keys(extra, role).notes


def test_the_table_has_every_key_that_vllm_reads() -> None:
    theirs = {name for name, _ in keys_read(sources())}
    assert theirs == (TABLE.keys() - RETIRED) | SHARED


@pytest.mark.parametrize(
    "added",
    [
        'x = config.get_from_extra_config("brand_new", 1)',
        'x = config.kv_connector_extra_config["brand_new"]',
        'x = extra_config.get("brand_new")',
        "x = config.get_from_extra_config(name, 1)",
    ],
)
def test_a_key_that_vllm_adds_would_be_noticed(added: str) -> None:
    """Negative control: in each way to read one, and under a name that is computed."""
    theirs = {name for name, _ in keys_read(f"{sources()}\n{added}\n")}
    assert theirs != (TABLE.keys() - RETIRED) | SHARED


def test_vllm_s_defaults_are_taken_one_by_one_and_together() -> None:
    """The values are of the types that vLLM's source has."""
    defaults = {name: value for name, value in keys_read(sources()) if value is not NO_DEFAULT}
    assert defaults.items() >= {"num_threads": 4, "backends": ["UCX"]}.items()
    assert defaults["decoder_kv_blocks_ttl"] == ANSWER_TTL_S
    for name, value in defaults.items():
        settings({name: value})
    made = settings(defaults)
    assert (made.kv_lease_duration, made.lend_back, made.layout) == (30.0, None, "auto")


@pytest.mark.parametrize("name", [key.name for key in IN_TREE_KEYS if not key.ours])
def test_a_key_that_is_not_needed_changes_nothing_and_is_answered(name: str) -> None:
    (note,) = notes({name: 4})
    assert note.startswith(f"{name} is not needed, because ")
    assert settings({name: 4}) == settings({})
    assert notes({}) == notes({"lend_back": True, "layout": "BLHNC"}) == ()


def test_answers_are_lent_back_for_as_long_as_decode_would_keep_them() -> None:
    assert settings({"bidirectional_kv_xfer": True}).lend_back == LendBack(480.0)
    given = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 90}
    assert settings(given).lend_back == LendBack(90.0)
    assert notes(given) == ()
    assert settings({"bidirectional_kv_xfer": False}).lend_back is None


def test_a_time_for_answers_that_are_not_lent_is_answered() -> None:
    for given in ({}, {"bidirectional_kv_xfer": False}):
        more = {**given, "decoder_kv_blocks_ttl": 90}
        assert settings(more).lend_back is None
        (note,) = notes(more)
        assert note.startswith("decoder_kv_blocks_ttl is not needed, because bidirectional_kv_xfer")


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_an_engine_of_one_role_starts_and_is_told_that_it_lends_no_answers(role: str) -> None:
    """vLLM 0.32 advises these roles; with ours they would not start, were it taken over."""
    given = {"bidirectional_kv_xfer": True}
    assert settings(given, role).lend_back is None
    (note,) = notes(given, role)
    assert "bidirectional_kv_xfer has no effect" in note
    assert f"kv_role={role}" in note


@pytest.mark.parametrize("value", [True, "True", "true"])
def test_cross_layer_blocks_are_a_layout(value: object) -> None:
    given = {"enable_cross_layers_blocks": value}
    assert settings(given).layout == read_layout(given) == "BHLNC"


@pytest.mark.parametrize("value", [False, "False", "false"])
def test_no_cross_layer_blocks_are_our_default(value: object) -> None:
    given = {"enable_cross_layers_blocks": value}
    assert settings(given).layout == read_layout(given) == "auto"
    assert settings({**given, "layout": "BLHNC"}).layout == "BLHNC"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"bidirectional_kv_xfer": True}, {"lend_back": True}),
        ({"bidirectional_kv_xfer": True}, {"lend_back": False}),
        ({"enable_cross_layers_blocks": True}, {"layout": "LBHNC"}),
        ({"enable_cross_layers_blocks": True}, {"layout": "BHLNC"}),
    ],
)
def test_a_key_of_theirs_beside_ours_for_the_same_is_an_error(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    (name,) = ours
    with pytest.raises(ConfigError) as caught:
        settings({**theirs, **ours})
    error = caught.value
    assert (error.field, error.seen) == (name, "both")
    assert next(iter(theirs)) in str(error.expected)
    settings(ours)
    settings(theirs)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("bidirectional_kv_xfer", "yes", "true or false"),
        ("decoder_kv_blocks_ttl", 0, "seconds above 0"),
        ("decoder_kv_blocks_ttl", "480", "seconds above 0"),
        ("enable_cross_layers_blocks", 1, "true or false"),
        ("engine_ttl", "an hour", "a number"),
        ("num_threads", True, "a number"),
        ("kv_recompute_threshold", None, "a number"),
        ("push_registration_timeout", [], "a number"),
    ],
)
def test_a_wrong_value_names_key_expected_and_seen(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected {expected}") as caught:
        settings({name: value})
    assert caught.value.seen == repr(value)


def test_a_misspelt_key_of_theirs_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="'num_thread'; did you mean 'num_threads'"):
        settings({"num_thread": 4})


def test_what_is_taken_over_is_a_key_of_ours_and_no_key_is_in_both_tables() -> None:
    assert {key.ours for key in IN_TREE_KEYS} - {""} <= OWN
    assert not OWN & TABLE.keys()


def test_the_user_s_own_mapping_is_left_as_it_was() -> None:
    """vLLM hands the same one to every part."""
    given = {"bidirectional_kv_xfer": True, "num_threads": 4, "verify": "off"}
    before = dict(given)
    assert translate(given).extra.keys() == {"lend_back", "verify"}
    assert given == before


def test_each_answer_is_logged_once_at_the_engine_s_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdconn")
    given: dict[str, object] = {"num_threads": 4, "engine_ttl": 60, "verify": "off"}
    answer_in_tree_keys(config(extra=given))
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in said] == [
        "pdconn: engine_ttl is not needed",
        "pdconn: num_threads is not needed",
    ]
