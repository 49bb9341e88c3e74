"""Command lines are read as vLLM's own parser reads them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import shlex
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.given.arguments import OPTIONS, Arguments, read_arguments
from pdconn.tools.doctor.given.judge import _TRANSFER_KEYS

KV = '{"kv_connector": "PdconnConnector", "kv_role": "kv_both"}'
EXTRA = "--kv-transfer-config.kv_connector_extra_config"
NAMED = "--kv-transfer-config.kv_connector=PdconnConnector --kv-transfer-config.kv_role=kv_both"
OFF = "--disable-hybrid-kv-cache-manager"

LINES = [
    f"m --kv-transfer-config '{KV}'",
    f"m --kv_transfer_config='{KV}' --port 8100",
    f"m --kv-transfer '{KV}' {OFF}",
    f"m --kv_t '{KV}' --disable-h",
    f"{OFF} m --kv-transfer-config '{KV}'",
    f"m --no-disable-hybrid-kv-cache-manager --kv-transfer-config '{KV}'",
    f"m {OFF} --no-disable_hybrid_kv_cache_manager --kv-transfer-config '{KV}'",
    f"m -O3 -dp 4 -dpl=2 --kv-transfer-config '{KV}' -O 2",
    f"m -O=1 --data_parallel_size 4 --data-parallel-size-l 2 --kv-transfer-config '{KV}'",
    f"m {NAMED}",
    f"m {NAMED} {EXTRA}.kv_lease_duration 60 {EXTRA}.verify=always {EXTRA}.huge_pages false",
    f"m {NAMED} {EXTRA}.store.capacity 80g {EXTRA}.a 1K {EXTRA}.b 2.5K {EXTRA}.c 1.5m",
    f"m {NAMED} {EXTRA}.warm_peers+ a:1 {EXTRA}.warm_peers+=b:2,c:3",
    f"m {NAMED} --kv_transfer_config.kv_connector_extra_config.a.b 1 {EXTRA}.a.c '[1, 2]'",
    f"m --kv-transfer-config '{KV}' --kv-transfer-config.kv_role=kv_consumer "
    "--kv-transfer-config.kv_connector X",
    "m --kv-transfer-config '{\"kv_connector\": \"X\", \"kv_role\": \"kv_both\"}' "
    f"--kv-transfer-config '{KV}'",
    f"m --kv-transfer-config='{KV[:-1]}, \"kv_connector_extra_config\": {{\"a\": 80m}}}}'",
    "m --kv-transfer-config None",
    f"m --served-model-name one two --kv-transfer-config '{KV}'",
]  # fmt: skip

FILES = [
    {"kv-transfer-config": json.loads(KV), "port": 8100, "served-model-name": ["a", "b"]},
    {"kv_transfer_config": KV, "disable-hybrid-kv-cache-manager": True},
    {"kv-transfer-config": json.loads(KV), "disable_hybrid_kv_cache_manager": False},
    {
        "kv-transfer-config.kv_connector": "PdconnConnector",
        "kv-transfer-config.kv_role": "kv_both",
        "kv-transfer-config.kv_connector_extra_config.huge_pages": False,
        "data-parallel-size": 2,
    },
    {"trust-remote-code": False, "kv-transfer-config": {**json.loads(KV), "kv_port": 1}},
]

REFUSED = [
    "m --kv-transfer-config",
    "m --kv-transfer-config --port 8100",
    "m --kv-transfer-config '{\"kv_role\"'",
    "m --kv-transfer-config 7",
]


class _Refused(Exception):
    """vLLM would not start."""


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(prog="vllm")
    serve = make_arg_parser(made.add_subparsers().add_parser("serve", exit_on_error=False))

    def error(message: str) -> NoReturn:
        raise _Refused(message)

    serve.error = made.error = error
    return made


def theirs(parser: FlexibleArgumentParser, words: list[str]) -> dict[str, Any]:
    """What vLLM starts with."""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            found = parser.parse_args(["serve", *words])
        except argparse.ArgumentError as error:
            raise _Refused(str(error)) from None
    transfer = found.kv_transfer_config
    return {
        "transfer": None if transfer is None else dataclasses.asdict(transfer),
        **{
            o.name: bool(value) if o.is_flag else value
            for o in OPTIONS
            if o.name != "kv_transfer_config"
            for value in [getattr(found, o.name)]
        },
    }


def as_vllm(found: Arguments) -> dict[str, Any]:
    """Ours in the same form, with vLLM's own defaults."""
    transfer = found.transfer
    defaults = {"data_parallel_size": 1}
    return {
        "transfer": None if transfer is None else dataclasses.asdict(KVTransferConfig(**transfer)),
        **{
            o.name: bool(value) if o.is_flag else None if value is None else int(value)
            for o in OPTIONS
            if o.name != "kv_transfer_config"
            for value in [found.options.get(o.name, defaults.get(o.name))]
        },
    }


def same(ours: dict[str, Any], real: dict[str, Any]) -> None:
    for each in (ours, real):
        if each["transfer"] is not None:
            each["transfer"].pop("engine_id")
    assert ours == real


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_read_alike(line: str, parser: FlexibleArgumentParser) -> None:
    words = shlex.split(line)
    same(as_vllm(read_arguments(words, lambda path: None)), theirs(parser, words))


@pytest.mark.parametrize("config", FILES, ids=lambda config: next(iter(config)))
@pytest.mark.parametrize("more", ["", "--kv-transfer-config '{}'", f"{NAMED} {EXTRA}.a 1", "-dp 8"])
def test_a_file_of_config_is_read_alike(
    config: dict[str, Any], more: str, parser: FlexibleArgumentParser, tmp_path: Path
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    words = ["m", "--config", str(path), *shlex.split(more)]
    same(as_vllm(read_arguments(words, lambda _: config)), theirs(parser, words))


@pytest.mark.parametrize("line", REFUSED)
def test_what_vllm_refuses_is_refused(line: str, parser: FlexibleArgumentParser) -> None:
    words = shlex.split(line)
    with pytest.raises(_Refused):
        theirs(parser, words)
    with pytest.raises(BadQuestion):
        read_arguments(words, lambda path: None)


def test_what_vllm_leaves_out_is_said(parser: FlexibleArgumentParser) -> None:
    key = "kv-transfer-config.kv_connector_extra_config.rehearse"
    config = {**FILES[3], key: False}
    (words,) = read_arguments(["--config", "a.yaml"], lambda _: {key: False}).ignored
    assert words.startswith(f"{key}: false")
    assert read_arguments(["--config", "a.yaml"], lambda _: {key: "off"}).ignored == ()
    (words,) = read_arguments(["m", "--config=a.yaml"], lambda _: config).ignored
    assert "with a space" in words
    assert theirs(parser, ["m", "--config=a.yaml"])["transfer"] is None
    (words,) = read_arguments(shlex.split(f"--kv-t '{KV}' {NAMED}"), lambda _: {}).ignored
    assert words.startswith("--kv-transfer-config as one value")


def test_the_table_of_options_is_vllms(parser: FlexibleArgumentParser) -> None:
    actions = parser._subparsers._group_actions[0].choices["serve"]._option_string_actions
    for option in OPTIONS:
        action = actions[option.long]
        assert action.dest == option.name
        assert (action.nargs == 0) is option.is_flag
        short = {name for name in action.option_strings if not name.startswith("--")}
        assert set(option.short) == short
        for at in range(3, len(option.long)):
            found = {id(actions[name]) for name in actions if name.startswith(option.long[:at])}
            is_alone = found == {id(action)}
            assert is_alone == option.long[:at].startswith(option.least), option.long[:at]


def test_the_keys_of_the_connector_s_configuration_are_vllms() -> None:
    assert set(_TRANSFER_KEYS) == {field.name for field in dataclasses.fields(KVTransferConfig)}
