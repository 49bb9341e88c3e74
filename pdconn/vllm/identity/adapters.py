"""Which adapter a prompt is computed with: a digest of its files, since a name may be reused.

Files are read on a thread of their own, from a request's arrival on, since a file system may hang.
When a prompt has been computed, its adapter has been loaded from the same files, and its digest is
known.  The digest of an adapter that vLLM fetches from a hub is unknown.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdconn.protocol.errors import TicketError
from pdconn.sidechannel.clock import steady
from pdconn.vllm.identity.model_files import weights_digest
from transport.errors import shown

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""An adapter whose files were not read within this time is unknown."""

_CHANGED = ""
_seen: dict[tuple[str, str], str] = {}
"""Adapters by name and path: the digest of their files, or :data:`_CHANGED` once they differed."""


def adapter_digest(lora: Any) -> str | None:
    """The digest of an adapter's files; None if they cannot be read, or have changed.

    Reads files, so not on the engine's thread.

    Args:
        lora: vLLM's ``LoRARequest``.
    """
    found = _files_digest(lora)
    if found is None:
        return None
    # After a change the weights in memory may be the old ones, and so may blocks in vLLM's prefix
    # cache, which identifies an adapter by name and path.  So the digest is unknown until a
    # restart.
    which = str(lora.lora_name), str(lora.lora_path)
    first = _seen.setdefault(which, found)
    if first in (found, _CHANGED):
        return first or None
    _seen[which] = _CHANGED
    log.warning(
        "pdconn: files of an adapter have changed: its prompts are neither stored nor handed over "
        "until the engine is restarted: adapter=%s",
        shown(which[0]),
    )
    return None


def _files_digest(lora: Any) -> str | None:
    path = Path(lora.lora_path)
    try:
        files = tuple(sorted((f.name, f.stat().st_ctime_ns, f.stat().st_size)
                             for f in path.iterdir() if f.is_file()))  # fmt: skip
        return _digest_of(str(path), files)
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=1024)
def _digest_of(path: str, files: tuple[tuple[str, int, int], ...]) -> str | None:
    weights = weights_digest(path)
    config = Path(path, "adapter_config.json")
    if weights is None:
        return None
    settings = config.read_text(encoding="utf-8") if config.is_file() else ""
    return hashlib.sha256(f"{weights}|{settings}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a request.

    Attributes:
        digest: of its files; empty without an adapter, None if it is unknown.
        is_read: whether the digest is final.
    """

    digest: str | None
    is_read: bool = True

    def __str__(self) -> str:
        return "not known" if self.digest is None else self.digest or "none"


NO_ADAPTER = Adapter("")


_MOST = 4096


class AdapterReader:
    """Reads the adapters of requests, on a thread that may hang.

    The first digest of an adapter is kept, since its files were loaded then.  Later requests read
    the files again, to detect changes.

    Args:
        read: returns the digest of an adapter; may block.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        read: Callable[[Any], str | None] = adapter_digest,
        clock: Callable[[], float] = steady,
    ) -> None:
        self._read, self._clock = read, clock
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[tuple[Any, str | None]] = queue.SimpleQueue()
        self._since: dict[tuple[str, str], float] = {}
        self._known: OrderedDict[tuple[str, str], Adapter] = OrderedDict()
        self._thread: threading.Thread | None = None

    def read_adapter_of(self, request: Any) -> None:
        """Start reading the files of the adapter of a new request."""
        lora = request.lora_request
        if lora is None or _key(lora) in self._since:
            return
        if self._thread is None:  # a daemon: an engine ends even if a file system hangs
            self._thread = threading.Thread(target=self._run, name="pdconn-adapters", daemon=True)
            self._thread.start()
        self._since[_key(lora)] = self._clock()
        self._asked.put(lora)

    def adapter_of(self, request: Any) -> Adapter:
        """The request's adapter, as far as it is known.  Never blocks."""
        if request.lora_request is None:
            return NO_ADAPTER
        while not self._answered.empty():
            lora, digest = self._answered.get()
            self._since.pop(_key(lora), None)
            self._known[_key(lora)] = Adapter(digest)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        key = _key(request.lora_request)
        if key in self._known:
            return self._known[key]
        is_late = self._clock() - self._since.get(key, -PATIENCE_S) > PATIENCE_S
        return Adapter(None, is_late)

    def compare(self, request: Any, theirs: str) -> tuple[bool, str]:
        """Whether our adapter has been read, and how it differs from that of a ticket."""
        ours = self.adapter_of(request)
        if ours == NO_ADAPTER or not ours.is_read or ours.digest == theirs:
            return ours.is_read, ""  # without an adapter the prompts differ by its name
        return True, f"adapter: theirs {theirs or 'not known'}, ours {ours}"

    def proof_of(self, request: Any) -> str:
        """The digest of a prompt's adapter, for its ticket.

        Raises:
            TicketError: it is unknown.
        """
        digest = self.adapter_of(request).digest
        if digest is None:
            name = request.lora_request.lora_name
            raise TicketError("pdconn.adapter", "one whose files are known", name)
        return digest

    def _run(self) -> None:
        while True:
            lora = self._asked.get()
            self._answered.put((lora, self._read(lora)))


def _key(lora: Any) -> tuple[str, str]:
    return str(lora.lora_name), str(lora.lora_path)
