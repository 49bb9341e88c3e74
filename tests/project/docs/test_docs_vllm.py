"""What ``docs/`` says of vLLM: its metrics, and the commands that start it."""

from __future__ import annotations

import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

from pdconn.vllm.config import KEYS
from pdconn.vllm.connector import PdconnConnector
from tests.project.docs.generate import DOCS, PARTS, stale
from tests.project.docs.pages import Command
from tests.project.docs.test_generated import as_it_is
from tests.project.docs.test_quickstart import SERVED, STARTED, engine_words, transfer_config


def test_what_engines_count_is_what_the_code_says() -> None:
    page = DOCS / "metrics.md"
    only = {**PARTS, "router-metrics": as_it_is(page, "router-metrics")}
    assert list(stale([page], only)) == [], "run `make docs ARGS=--write`"


@pytest.mark.parametrize("command", SERVED, ids=str)
def test_vllm_takes_the_command(command: Command) -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(engine_words(command))
    config = args.kv_transfer_config
    given = config if isinstance(config, dict) else vars(config)
    transfer = KVTransferConfig(**given)
    assert KVConnectorFactory.get_connector_class(transfer) is PdconnConnector
    assert given["kv_role"] == transfer_config(command)["kv_role"]


def test_vllm_takes_the_engines_that_have_no_connector() -> None:
    alone = [one for one in STARTED if one not in SERVED]
    assert {one.page for one in alone} == {"tutorial.md"}, "what two engines are compared with"
    for command in alone:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(engine_words(command))
        assert args.kv_transfer_config is None


def test_a_command_with_a_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control."""
    words = [word.replace("kv_role", "kv_roll") for word in SERVED[0].words[2:]]
    for wrong in (words, ["MODEL", "--prot", "8100"]):
        with pytest.raises((SystemExit, ValueError, TypeError)):
            make_arg_parser(FlexibleArgumentParser()).parse_args(wrong)
    capsys.readouterr()


def test_every_key_of_the_in_tree_connector_has_a_line() -> None:
    spec = find_spec("vllm.distributed.kv_transfer.kv_connector.v1.nixl")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    source = "".join(path.read_text(encoding="utf-8") for path in Path(folder).glob("*.py"))
    theirs = set(re.findall(r"get_from_extra_config\(\s*\"(\w+)\"", source))
    assert {"kv_lease_duration", "backends", "engine_ttl"} <= theirs
    page = (DOCS / "from-nixlconnector.md").read_text(encoding="utf-8")
    section = page.partition("## Its keys")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    shared = {key.name for key in KEYS if key.in_tree == "the same key"}
    assert theirs <= listed | shared
    assert shared <= theirs
    assert not listed & {key.name for key in KEYS}
