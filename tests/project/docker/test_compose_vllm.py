"""What the stack in ``docker/`` tells vLLM it takes, and what its dashboard asks engines say."""

from __future__ import annotations

import ast
import json
import warnings
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from pdconn.vllm.stats import PdPromMetrics

from tests.project.docker.dashboard import Exported, dashboard, exported_by, unknown
from tests.project.docker.stack import load

STACKS = {"cpu": ("compose.yaml",), "gpu": ("compose.yaml", "compose.gpu.yaml")}
COMMANDS = [
    pytest.param(service["command"], id=f"{stack}-{name}")
    for stack, files in STACKS.items()
    for name, service in load(*files).engines().items()
]
LABELS = ["model_name", "engine"]


def parsed(words: list[str]) -> AsyncEngineArgs:
    """What vLLM makes of a command line; SystemExit where it refuses."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    return AsyncEngineArgs.from_cli_args(args)


@pytest.mark.parametrize("command", COMMANDS)
def test_vllm_takes_the_command_and_finds_the_connector(command: list[str]) -> None:
    args = parsed(command)
    transfer = args.kv_transfer_config
    assert isinstance(transfer, KVTransferConfig)
    module = import_module(transfer.kv_connector_module_path or "")
    assert hasattr(module, transfer.kv_connector or "")
    assert transfer.kv_role in ("kv_producer", "kv_consumer")
    assert isinstance(args.kv_events_config, KVEventsConfig)
    assert args.kv_events_config.enable_kv_cache_events
    assert args.enable_prefix_caching


@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("--enable-prefix-caching", "--enable-prefix-cashing"),
        ("--port=8000", "--port=http"),
        ('"kv_role"', '"kv_roll"'),
        ("kv_producer", "kv_lender"),
        ('"publisher"', '"publishre"'),
    ],
)
def test_a_command_with_a_fault_is_refused(
    true: str, false: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = load("compose.yaml").services["p1"]["command"]
    assert true in " ".join(words)
    with pytest.raises((SystemExit, ValueError, TypeError)):
        parsed([word.replace(true, false) for word in words])
    capsys.readouterr()


@pytest.fixture(scope="module")
def engines_metrics() -> Exported:
    """All that an engine shows: ours as we register them, vLLM's as its source does."""
    registry = CollectorRegistry()
    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    PdPromMetrics(config, types, LABELS, {0: ["m", "0"]})
    return {**vllms_own(), **exported_by(registry.collect())}


def vllms_own() -> Exported:
    """Metrics that vLLM's logger makes, read from its code: making one takes an engine."""
    spec = find_spec("vllm.v1.metrics.loggers")
    assert spec is not None
    assert spec.origin is not None
    registry = CollectorRegistry()
    kinds: dict[str, Any] = {
        "_counter_cls": Counter, "_gauge_cls": Gauge, "_histogram_cls": Histogram
    }  # fmt: skip
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = kinds.get(node.func.attr)
            name = next((k.value for k in node.keywords if k.arg == "name"), None)
            if kind is not None and isinstance(name, ast.Constant):
                kind(name.value, "vLLM's", LABELS, registry=registry).labels("m", "0")
    return exported_by(registry.collect())


def test_what_is_asked_of_engines_they_say(engines_metrics: Exported) -> None:
    assert len(engines_metrics) > 100
    assert unknown(dashboard(), engines_metrics, "(pdconn|vllm):") == []


@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("pdconn:pulls_total", "pdconn:pulls"),
        ("vllm:nixl_xfer_time_seconds_bucket", "vllm:nixl_transfer_time_seconds_bucket"),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("by (le, role)", "by (le, rank)"),
    ],
)
def test_a_dashboard_with_a_fault_is_refused(
    true: str, false: str, engines_metrics: Exported
) -> None:
    text = json.dumps(dashboard())
    assert true in text
    assert unknown(json.loads(text.replace(true, false)), engines_metrics, "(pdconn|vllm):") != []
