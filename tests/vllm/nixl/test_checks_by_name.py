"""What vLLM does because a connector is called NixlConnector, and what comes of it with ours.

``BY_NAME`` has every place in vLLM that compares the name; it is compared with the source, and
``docs/from-nixlconnector.md`` has a row for each.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from pdconn.vllm.supported import check_supported

from pdconn.vllm.config import ConfigError
from tests.project.docs.generate import DOCS
from tests.vllm.test_supported import config

NAME = "NixlConnector"

BY_NAME = {
    ("config/vllm.py", "_verify_aux_output_compatibility"): "routed experts",
    ("config/vllm.py", "__post_init__"): "context parallelism, HiSparse",
    ("config/vllm.py", "adjust_dcp_kv_cache_interleave_size"): "context parallelism",
    ("config/vllm.py", "validate_block_size"): "context parallelism",
    ("platforms/cpu.py", "check_and_update_config"): "states on a CPU",
    ("models/step5/nvidia/model.py", "_verify_step5_dsa_kv_transfer_compatibility"): "Step 5",
}
"""Functions of vLLM that look for the name, and the row of the page that has what they do.  A file
that the installed vLLM lacks is one of 0.33."""

THEIR_OWN = (
    "distributed/kv_transfer/kv_connector/v1/nixl/",
    "distributed/kv_transfer/kv_connector/factory.py",
)


def places(source: str) -> Iterator[str]:
    """The functions of ``source`` in which the name stands, or ``module``."""
    tree = ast.parse(source)
    for node, owner in _walk(tree, "module"):
        if isinstance(node, ast.Constant) and node.value == NAME:
            yield owner


def _walk(node: ast.AST, owner: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        inside = child.name if is_function else owner  # type: ignore[attr-defined]
        yield child, inside
        yield from _walk(child, inside)


def installed() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    return Path(folder)


def places_in_vllm() -> set[tuple[str, str]]:
    folder, found = installed(), set()
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        if name.startswith(THEIR_OWN) or f'"{NAME}"' not in (
            source := path.read_text(encoding="utf-8")
        ):
            continue
        found |= {(name, owner) for owner in places(source)}
    return found


def test_every_place_that_goes_by_the_name_is_known_and_has_a_row() -> None:
    assert places_in_vllm() == {each for each in BY_NAME if (installed() / each[0]).exists()}
    page = (DOCS / "from-nixlconnector.md").read_text(encoding="utf-8")
    section = page.partition("## What vLLM does by the name")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines()]
    for topics in BY_NAME.values():
        for topic in topics.split(", "):
            assert any(row.startswith(topic) for row in rows), topic


def test_another_place_would_be_noticed() -> None:
    """Negative control."""
    assert list(places(f'def other(config):\n    return config.has_connector("{NAME}")\n')) == [
        "other"
    ]
    assert list(places(f'NAMES = ("{NAME}",)\n')) == ["module"]
    assert list(places(f'def other():\n    """As {NAME} does."""\n')) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"experts": True}, "enable_return_routed_experts"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"hisparse": object()}, "hisparse_config"),
    ],
)
def test_what_the_name_would_let_through_is_refused_by_us(given: Any, text: str) -> None:
    """vLLM accepts context parallelism and HiSparse of a connector by that name."""
    with pytest.raises(ConfigError, match=text):
        check_supported(config(**given))
