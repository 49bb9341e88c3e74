"""The doctor and two real engines: a golden prompt is pulled, and its counters are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.cli.main import main
from pdconn.tools.doctor.local.used import read_ucx_log
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.model import write_model
from tests.forked.engines import running
from tests.tools.doctor.healthy import ids
from tests.vllm.engines.engines import Configuration, cache_beside, engine, secret_beside

pytestmark = [pytest.mark.engine, pytest.mark.matrix, pytest.mark.timeout(900)]

LAYOUT = Configuration("BHLNC", False, one_process=True, policy="recompute", guarded=True)


@dataclass(frozen=True)
class RealPair:
    """Two engines with a secret, and the words to ask about them."""

    prefill: Engine
    decode: Engine
    description: Path
    secret: Path

    @property
    def words(self) -> list[str]:
        channel = f"127.0.0.1:{self.prefill.spec.side_channel_port}"
        return [
            "doctor", "--no-local", "--json", "--golden", "--timeout", "60",
            "--prefill", self.prefill.url, "--decode", self.decode.url,
            "--prefill-channel", channel, "--decode-channel", str(self.description),
            "--secret-file", str(self.secret), "--link", "1GB/s",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPair]:
    folder = tmp_path_factory.mktemp("doctor")
    model, description = write_model(folder), folder / "decode.json"
    unrehearsed = {"rehearse": False}  # a rehearsal's reads are in UCX's log, too
    written = {"description_file": str(description), **unrehearsed}
    specs = [
        engine("prefill", model, LAYOUT, "kv_producer", 0, **unrehearsed),
        engine("decode", model, LAYOUT, "kv_consumer", 1, **written),
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("UCX_PROTO_INFO", "used")
        patched.delenv("UCX_LOG_FILE", raising=False)
        with running(specs, folder, cache=cache_beside(model)) as (prefill, decode):
            yield RealPair(prefill, decode, description, secret_beside(model))
    # UCX reports as connections end; prefill, which reads nothing, is the control.
    assert sum(count for _, count in read_ucx_log(str(folder / "decode.log")).counts) > 0
    assert read_ucx_log(str(folder / "prefill.log")).counts == ()


def ask(words: list[str], capsys: Any) -> tuple[int, dict[str, Any]]:
    code = main(words)
    return code, json.loads(capsys.readouterr().out)


def test_a_real_pair_is_healthy_and_the_golden_prompt_was_pulled(
    real: RealPair, capsys: Any
) -> None:
    code, document = ask(real.words, capsys)
    assert (code, document["findings"]) == (0, [])
    seen = {check["name"]: check["seen"] for check in document["checks"]}
    assert "16 tokens equal, pulled, ticket names 127.0.0.1:" in seen["golden"][0]
    assert "can pull" in seen["pairs"][0]
    assert "vLLM 0." in seen["engines"][0]


def test_a_real_pair_in_the_wrong_roles_is_not(real: RealPair, capsys: Any) -> None:
    """Negative control: decode gives no ticket."""
    words = ["doctor", "--no-local", "--json", "--golden", "--timeout", "60"]
    swapped = ["--prefill", real.decode.url, "--decode", real.prefill.url]
    code, document = ask([*words, *swapped], capsys)
    assert (code, ids(document)) == (1, ["golden.failed"])
