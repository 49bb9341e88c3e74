"""An encrypted store behind a real engine: it loads what it saved, and its files tell nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdconn.store.format.prompt_rows import Chain
from pdconn.tools.lab.lab_client import Client
from tests.forked.engines import running
from tests.store.encryption.key_files import KEYS, key_file
from tests.vllm.engines.engines import Expected, cache_beside
from tests.vllm.engines.store.stores import (
    TOKENS,
    asked,
    hit_tokens,
    num_rows,
    prompts,
    resumable,
    rows,
    store_engine,
    wait_for_rows,
)

pytestmark = pytest.mark.matrix  # test_beside.py has an encrypted store, too

LENGTHS = (TOKENS + 1, 3 * TOKENS, 700, 1500)


@pytest.fixture(scope="module")
def sealed(model: Path, work: Path, expected: Expected) -> Iterator[tuple[Client, Path]]:
    """The configuration of the engine of ``test_store.py``, and a key file."""
    del expected  # its engine starts first
    root = work / "sealed"
    keys = key_file(work / "keys", KEYS[0])
    spec = store_engine("sealed", model, root, layout="BHLNC", key_file=keys)
    with running([spec], work / "sealed-engine", cache=cache_beside(model)) as (engine,):
        yield Client(engine.url), root


def test_encrypted_rows_are_loaded_and_answer_the_same_and_name_no_prompt(
    sealed: tuple[Client, Path], expected: Expected
) -> None:
    client, root = sealed
    wanted = prompts(51, LENGTHS)
    assert not expected.mismatches(asked(client, wanted))
    assert hit_tokens(client) == 0
    wait_for_rows(root, num_rows(wanted))
    assert not expected.mismatches(asked(client, wanted))
    assert hit_tokens(client) == sum(map(resumable, wanted))
    files = [path for path in root.rglob("*") if path.is_file()]
    seen = b"\n".join(f"{path}\n".encode() + path.read_bytes() for path in files)
    for prompt in wanted:
        for key in Chain(TOKENS).extended(prompt).keys:
            assert key not in seen
            assert key.hex().encode() not in seen
    assert {path.parents[2].name[:7] for path in rows(root, "fa")} == {"sealed-"}
