"""Connectors that are wrong about states, windows or drafts, for ``kv_connector_module_path``."""

from __future__ import annotations

from typing import Any

import torch

from pdconn.store.rank.shares import RowShare
from pdconn.vllm import scheduler
from pdconn.vllm.connector import PdConnector


class WholePrompt(PdConnector):
    """Prefill computes the last prompt token too, and decode takes what it lends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        half = self._scheduler
        for side in (half._producer, half._consumer) if half is not None else ():
            if side is not None:
                side._has_states = False


class HeldByAll(PdConnector):
    """Takes what full attention holds of a prompt for held by windows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler.held_tokens = lambda config, blocks, num_local: (num_local,) * len(blocks)


class FlippedState(PdConnector):
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


class TrustingStore(PdConnector):
    """Believes what its store holds, whatever the checksums say."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        RowShare.check = lambda *args: None  # type: ignore[method-assign]


class FlippedDraft(PdConnector):
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
