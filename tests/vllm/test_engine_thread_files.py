"""The engine's thread touches no file and no socket, in any hook of scheduler and worker.

What a store or a peer needs of either is done on threads of ours; a dead NFS must not stop the
engine.  A byte that wakes such a thread, over a pair of sockets in this process, is allowed.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.store.settings import StoreSettings
from tests.fakes.engine_thread import FileTouched, touches_nothing
from tests.fakes.simulated.requests import vllm_request
from tests.store.joined.rig import FakeEngine, until_ready
from tests.store.joined.test_joined import prompt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.metadata import PdMetadata
    from pdconn.vllm.store.storing import Storing
    from tests.fakes.simulated.block_pool import CountedPool
    from tests.fakes.simulated.hooks import allocated, every_group, finished, matched
    from tests.vllm.store.test_extras import adapter
    from tests.vllm.test_engine_thread import MANY, in_flight

PATIENCE_S = 30.0


@pytest.mark.parametrize(
    "touch",
    [
        lambda: open("/dev/null", encoding="utf-8").close(),
        lambda: os.stat("/"),
        lambda: list(Path("/").iterdir()),
        lambda: Path("/").exists(),
        lambda: socket.create_connection(("127.0.0.1", 9), timeout=0.01),
    ],
)
def test_the_watch_sees_what_touches_a_file_or_a_socket(touch: Callable[[], object]) -> None:
    """Control."""
    with pytest.raises(FileTouched), touches_nothing():
        touch()


class StoredEngine:
    """vLLM's side of a store in the scheduler's process, and ranks with their own threads."""

    def __init__(self, root: Path) -> None:
        settings = StoreSettings(
            str(root), 64 << 20, staging=8 << 20, block_tokens=64, min_tokens=1, save="all"
        )
        self.ranks = FakeEngine(settings, budget=None)
        until_ready(self.ranks)
        self.store = Storing(settings, None, "writer", every_group())
        self.pool = CountedPool(100)
        self.store.bind_gpu_block_pool(self.pool)
        self.store._store, self.store._namespace = self.ranks.store, "ns"

    def request(self, name: str, tokens: list[int], lora: Any, **more: Any) -> Any:
        made = vllm_request(
            request_id=name, prompt_token_ids=tokens, prompt_embeds=None, pooling_params=None,
            resumable=False, all_token_ids=tokens, num_prompt_tokens=len(tokens),
            num_tokens=len(tokens), num_computed_tokens=0, skip_reading_prefix_cache=False,
            lora_request=lora, cache_salt=None, mm_features=[], kv_transfer_params=None,
        )  # fmt: skip
        vars(made).update(more)
        return made

    def run(self, request: Any) -> int:
        """Every hook of a request's life, in vLLM's order; tokens that were loaded."""
        found, ids = self._matched(request), self._blocks(request)
        with touches_nothing():
            allocated(self.store, request, ids, found)
        stored, end = self.ranks.store._requests[request.request_id], time.monotonic() + PATIENCE_S
        is_known = False
        while not is_known:  # an adapter's files are looked at between two steps
            is_known = stored.known_extras is not None  # before the step, which saves only then
            self._step(request, ids, request.num_tokens - found)
            assert time.monotonic() < end
            time.sleep(0.02)
        request.num_computed_tokens = len(request.all_token_ids)
        request.all_token_ids += prompt(99, 100)  # the answer
        self._step(request, ids, 100)
        with touches_nothing():
            self.store.end_load(request.request_id)
            finished(self.store, request)
            self.store.take_counts()
            self.store.take_gauges()
            self.store.take_events()
        self._until(lambda: self.ranks.store.is_settled() and not len(self.store._pins))
        return found

    def _matched(self, request: Any) -> int:
        end = time.monotonic() + PATIENCE_S
        with touches_nothing():
            self.store.on_new_request(request)
        while True:
            with touches_nothing():
                found, _ = matched(self.store, request, 0)
            if found is not None:
                return found
            assert time.monotonic() < end
            self._step(None, ([], []), 0)
            time.sleep(0.002)

    def _blocks(self, request: Any) -> tuple[list[int], list[int]]:
        count = -(-(request.num_tokens + 100) // 16)
        return list(range(1, 1 + count)), list(range(1, 1 + count))

    def _step(self, request: Any, ids: tuple[list[int], ...], count: int) -> None:
        scheduled = {} if request is None else {request.request_id: count}
        state = SimpleNamespace(get_block_ids=lambda name: ids, boundary_state_offloads={})
        output = SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens=scheduled)
        metadata = PdMetadata()
        with touches_nothing():
            self.store.build_connector_meta(output, metadata)
        results = []
        for rank in self.ranks.rank_stores:
            with touches_nothing():  # the worker's hooks
                for command in metadata.store:
                    rank.post_command(command)
                rank.after_pass()
                rank.take_loaded()
                rank.take_load_failures()
                results += rank.take_results()
                rank.take_rank_counts()
        with touches_nothing():
            self.store.note_results(results)

    def _until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < end
            self._step(None, ([], []), 0)
            time.sleep(0.002)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[StoredEngine]:
    made = StoredEngine(tmp_path / "root")
    yield made
    made.ranks.close()


def committed(engine: StoredEngine) -> int:
    return engine.ranks.store.take_store_counts().get("store_rows_committed", 0)


@pytest.mark.parametrize("skips", [False, True], ids=["looked up", "not looked up"])
@pytest.mark.parametrize("has_adapter", [False, True], ids=["plain", "adapter"])
def test_the_store_touches_no_file_on_the_engines_thread(
    tmp_path: Path, engine: StoredEngine, has_adapter: bool, skips: bool
) -> None:
    """An adapter's folder was listed there where no look-up had built its keys."""
    lora = adapter(tmp_path / "adapter", 1.0) if has_adapter else None
    tokens = prompt(3, 300)
    ask = engine.request("first", list(tokens), lora, skip_reading_prefix_cache=skips)
    assert engine.run(ask) == 0
    assert engine.run(engine.request("second", list(tokens), lora)) == 256


def test_reading_files_where_no_look_up_did_is_caught(
    tmp_path: Path, engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: as it was, files are read by who needs the keys."""
    scheduler = engine.ranks.store
    arrives = scheduler.on_new_request

    def arrived(*args: Any, reads_files: bool, **more: Any) -> None:
        arrives(*args, reads_files=False, **more)

    monkeypatch.setattr(scheduler, "on_new_request", arrived)
    ask = engine.request(
        "first", prompt(3, 300), adapter(tmp_path / "adapter", 1.0), skip_reading_prefix_cache=True
    )
    with pytest.raises(FileTouched, match="adapter"):
        engine.run(ask)


def test_a_reset_touches_no_file(engine: StoredEngine) -> None:
    engine.run(engine.request("first", prompt(3, 300), None))
    with touches_nothing():
        engine.pool.reset_prefix_cache()
    assert engine.run(engine.request("second", prompt(3, 300), None)) == 0


def test_decode_touches_no_file_and_no_socket_on_the_engines_thread() -> None:
    """Requests arrive, are pulled and received; scheduler's and worker's halves of decode."""
    with in_flight(1) as decode, touches_nothing():
        for _ in range(10):
            decode.step()
        decode.step(decode.requests(MANY))  # lent by a producer's half, then pulled
        decode.step()
