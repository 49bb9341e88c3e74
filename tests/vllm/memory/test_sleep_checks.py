"""What may sleep: a vLLM that tells the connector, and memory that no peer has mapped."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.vllm.config import ConfigError, read_settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig

    from pdconn.vllm.connector import PdconnConnector
    from pdconn.vllm.memory import sleep
    from pdconn.vllm.memory.opening import open_nixl
    from pdconn.vllm.memory.sleep import IS_TOLD, check_sleep, options_for_sleep
    from pdconn.vllm.supported import check_supported
    from tests.vllm.test_supported import config


def transfer(role: str = "kv_both", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="PdconnConnector",
        kv_role=role,
        kv_connector_extra_config=extra,  # type: ignore[arg-type]
    )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 0.32 as well, what 0.33 is asked."""
    monkeypatch.setattr(sleep, "IS_TOLD", True)


def test_vllm_0_32_does_not_tell_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "IS_TOLD", False)
    with pytest.raises(ConfigError, match=r"enable_sleep_mode: expected False.*0\.32"):
        PdconnConnector.supports_sleep_mode(transfer())


def test_this_vllm_tells_if_it_has_the_hooks() -> None:
    import vllm

    assert (tuple(map(int, vllm.__version__.split("+")[0].split(".")[:2])) >= (0, 33)) == IS_TOLD


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("extra", "environ", "error"),
    [
        ({}, {}, None),
        ({}, {"UCX_TLS": "^cuda_ipc"}, None),
        ({}, {"UCX_TLS": "rc,cuda_copy,tcp"}, None),
        ({}, {"UCX_TLS": "^rc,cuda"}, None),
        ({}, {"UCX_TLS": "all"}, r"UCX_TLS: expected \^cuda_ipc.*got 'all'"),
        ({}, {"UCX_TLS": "rc,cuda_ipc"}, "UCX_TLS: expected"),
        ({}, {"UCX_TLS": "rc,cuda"}, "UCX_TLS: expected"),
        ({}, {"UCX_TLS": "^rc"}, "UCX_TLS: expected"),
        (
            {"backend_options": {"UCX": {"engine_config": "X=1,UCX_TLS=all"}}},
            {},
            "backend_options UCX engine_config TLS: expected",
        ),
        (
            {"backend_options": {"UCX": {"engine_config": "TLS=all"}}},
            {"UCX_TLS": "tcp"},
            None,
        ),
        ({"backends": ["UCX", "GDS"]}, {}, r"backends: expected \['UCX'\]"),
        ({"store": {"root": "/kv"}}, {}, "enable_sleep_mode: .*a store"),
    ],
)
def test_what_stands_against_sleep_is_named(
    extra: dict[str, Any], environ: dict[str, str], error: str | None
) -> None:
    if error is None:
        check_sleep(transfer(**extra), environ)
        return
    with pytest.raises(ConfigError, match=error):
        check_sleep(transfer(**extra), environ)
    if "TLS" in error:  # an engine that only reads offers nobody its memory
        check_sleep(transfer("kv_consumer", **extra), environ)


@pytest.mark.usefixtures("told")
def test_the_engines_start_checks_it_too() -> None:
    engine = config(sleeps=True, device="cpu")
    engine.kv_transfer_config = transfer(backends=["UCX"])
    check_supported(engine)
    engine.kv_transfer_config = transfer(store={"root": "/kv"})
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        check_supported(engine)


def test_a_lender_that_may_sleep_offers_no_mappings_of_its_memory() -> None:
    assert options_for_sleep({}) == {"UCX": {"engine_config": "TLS=^cuda_ipc"}}
    theirs = {"UCX": {"engine_config": "TLS=tcp", "num_workers": "1"}}
    merged = options_for_sleep(theirs)["UCX"]
    assert merged == {"engine_config": "TLS=^cuda_ipc,TLS=tcp", "num_workers": "1"}
    assert theirs["UCX"]["engine_config"] == "TLS=tcp"


@pytest.mark.parametrize(
    ("lends", "sleeps", "config"),
    [(True, True, "TLS=^cuda_ipc"), (True, False, None), (False, True, None)],
)
def test_only_lenders_that_may_sleep_are_restricted(
    lends: bool, sleeps: bool, config: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(
        "pdconn.vllm.memory.opening.NixlTransport", lambda name, **options: opened.append(options)
    )
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    open_nixl(read_settings({}, "127.0.0.1", 1, 0), vllm_config, "name", lends=lends)
    [options] = opened
    assert options["backend_options"].get("UCX", {}).get("engine_config") == config
