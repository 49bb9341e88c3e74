"""What ``docs/`` says of vLLM: its metrics, and the commands that start it."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.docs.generate import DOCS, PARTS, stale
from tests.docs.pages import Command
from tests.docs.test_generated import as_it_is
from tests.docs.test_quickstart import SERVED, transfer_config


def test_what_engines_count_is_what_the_code_says() -> None:
    page = DOCS / "metrics.md"
    only = {**PARTS, "router-metrics": as_it_is(page, "router-metrics")}
    assert list(stale([page], only)) == [], "run `make docs ARGS=--write`"


@pytest.mark.parametrize("command", SERVED, ids=str)
def test_vllm_takes_the_command(command: Command) -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(command.words[2:])
    config = args.kv_transfer_config
    given = config if isinstance(config, dict) else vars(config)
    assert given["kv_connector"] == "PdConnector"
    assert given["kv_role"] == transfer_config(command)["kv_role"]


def test_a_command_with_a_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control."""
    words = [word.replace("kv_role", "kv_roll") for word in SERVED[0].words[2:]]
    for wrong in (words, ["MODEL", "--prot", "8100"]):
        with pytest.raises((SystemExit, ValueError, TypeError)):
            make_arg_parser(FlexibleArgumentParser()).parse_args(wrong)
    capsys.readouterr()
