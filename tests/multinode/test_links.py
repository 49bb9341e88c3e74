"""The benchmark of the cost model over real cables, cut short."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.multinode.namespaces import left_by, why_not
from tests.throughput.links import __main__ as links
from tests.throughput.links.machines import TOKEN_BYTES, WINDOW, joined

_WHY_NOT = why_not()
pytestmark = [
    pytest.mark.multinode,
    pytest.mark.timeout(240),
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
]

if importlib.util.find_spec("nixl") is None:
    pytest.skip("nixl is not installed", allow_module_level=True)


def test_bytes_pass_as_fast_as_the_cable_lets_them() -> None:
    """All that is missing, windows included, and nothing beside the cable."""
    before = left_by()
    for gbit_s in (0.2, 1.0):
        with joined(gbit_s, TOKEN_BYTES, 1024) as sides:
            sides.pull(0, 512)  # greets, connects
            seconds, nbytes = sides.pull(256, 1024)
        assert nbytes == TOKEN_BYTES * (768 + WINDOW)
        assert 0.7 <= 8 * nbytes / seconds / (1e9 * gbit_s) <= 1.02
    assert left_by() == before


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "links.json"
    words = ["--gbits", "1", "--requests", "12", "--longest", "1024", "--json", str(out)]
    assert links.main([*words, "--prefill-rate", "20000"]) in (links.EXIT_OK, links.EXIT_WRONG)
    [link] = json.loads(out.read_text(encoding="utf-8"))["links"]
    assert len(link["judged"]) == link["outcome"]["requests"] == 12
    assert link["judged"][0]["is_pulled"]  # a link that was never seen is tried
    assert link["outcome"]["pull_better"] == 0.0
    assert link["outcome"]["right_warm"] == 1.0
    assert "Gbit/s" in capsys.readouterr().out
