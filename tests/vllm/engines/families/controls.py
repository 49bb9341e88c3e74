"""Connectors that are wrong about states, windows, drafts or faults.

Named by ``kv_connector_module_path``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pdconn.puller.commands import CancelPull, FailPull, ReadBlocks
from pdconn.store.budget.fair_room import FairRoom
from pdconn.store.rank.copies import HostCopies
from pdconn.store.rank.shares import RowShare
from pdconn.store.rank.tasks import ReadRow, RowReader
from pdconn.vllm.blocks import transferred
from pdconn.vllm.connector import PdconnConnector
from pdconn.vllm.metadata import PdMetadata
from pdconn.vllm.pulls import tracked
from pdconn.vllm.scheduler import SchedulerParts
from tests.vllm.engines.store.stores import breaks, hangs
from transport import Spans


class WholePrompt(PdconnConnector):
    """Prefill computes the last prompt token too, and decode takes what it lends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parts = SchedulerParts() if self._scheduler is None else self._scheduler.parts
        if parts.lending is not None:
            parts.lending.tickets.has_states = False
        if parts.pulling is not None:
            parts.pulling._rules = replace(parts.pulling._rules, has_states=False)


class HeldByAll(PdconnConnector):
    """Takes what full attention holds of a prompt for held by windows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        transferred.held_tokens = lambda config, blocks, num_local: (num_local,) * len(blocks)


class Undigested(PdconnConnector):
    """Takes every ticket for a prefix of its prompt, whatever the tokens are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tracked._shared_with = lambda request, ticket, num_lookahead: ticket.num_tokens


class FlippedState(PdconnConnector):
    """After every pull one bit of every state of the first state layer is another."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        states = [view for view in kv_caches.values() if view.shape[1] == view.shape[2] == 1]
        self._flipped = states[0].view(torch.uint8)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            # The exponent of a float32 at the beginning of the convolution's window.
            self._flipped[..., 3] ^= 0x04
        return results


class TrustingStore(PdconnConnector):
    """Believes what its store holds, whatever the checksums say."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        RowShare.verify_row = lambda *args: None  # type: ignore[method-assign]


class BreakableLoads(PdconnConnector):
    """Right.  A copy from its store fails, and writes nothing, for each file at ``breaks``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._worker is None:
            return
        asked, copying = breaks(Path(self._worker._settings.store.root)), HostCopies.copy_in

        def copy_in(copies: HostCopies, spans: Spans) -> None:
            try:
                asked.unlink()  # of several ranks one finds it
            except FileNotFoundError:
                return copying(copies, spans)
            raise RuntimeError("CUDA out of memory")

        HostCopies.copy_in = copy_in  # type: ignore[method-assign]


class HangingReads(PdconnConnector):
    """Right.  A read of the row whose number is in the file at ``hangs`` waits until that is gone.

    So does a shelf whose server does not answer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._worker is None:
            return
        hangs_at, read = hangs(Path(self._worker._settings.store.root)), RowReader._read_share

        def read_share(reader: RowReader, share: RowShare, data: memoryview, task: ReadRow) -> None:
            index = task.of.fetch.rows[task.place].index
            while hangs_at.exists() and index == int(hangs_at.read_text() or -1):
                time.sleep(0.01)
            read(reader, share, data, task)

        RowReader._read_share = read_share  # type: ignore[method-assign]


class FlippedDraft(PdconnConnector):
    """After every pull two bits of every number of the drafter's keys and values are others."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        [_, self._draft] = kv_caches.values()  # a target of one layer, then its drafter's

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            # Sign of a float32, and a bit of its exponent: 256 times too large, or too small.
            self._draft.view(torch.uint8)[..., 3::4] ^= 0x84
        return results


class Hasty(PdconnConnector):
    """Takes every pull for received: one that failed, and one that was left, at once.

    So a request goes on with what its blocks hold, and blocks are given to others while a
    late read can still write to them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaited: set[str] = set()
        self._left: set[str] = set()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PdMetadata)
        for command in connector_metadata.commands:
            if isinstance(command, ReadBlocks | FailPull):
                self._awaited.add(command.request)
            elif isinstance(command, CancelPull) and command.request in self._awaited:
                self._left.add(command.request)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving.clear()
        received = (results.finished_recving & self._awaited) | self._left
        self._awaited -= received
        self._left.clear()
        results.finished_recving.clear()  # of what was reported already as well
        results.finished_recving.update(received)
        return results


class Unyielding(PdconnConnector):
    """Keeps every claim until it has blocks, and computes for others whatever it lends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._scheduler is not None:
            parts = self._scheduler.parts
            parts.every = tuple(one for one in parts.every if one is not parts.waits)
            parts.asked = tuple(one for one in parts.asked if one is not parts.waits)


class FirstComeSaves(PdconnConnector):
    """Saves rows of whoever asks first while there is room."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        FairRoom.admits = (  # type: ignore[method-assign]
            lambda self, tenant, nbytes, room, now: nbytes <= room
        )
