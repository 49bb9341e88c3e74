"""What a worker does before its first request, so that it finds its way prepared.

A rehearsal at the start takes away what the first pull does for the first time in this
process (:mod:`pdconn.rehearsal`); ``warm_peers`` takes away what the first pull from each
peer does (:mod:`pdconn.puller.warmup`).  Both fail softly: the first request is slower then.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

from pdconn.puller.warmup import WarmUp
from pdconn.puller.warmup_state import Place
from pdconn.rehearsal.rehearse import PagedTransport, rehearse
from registration.references import KVCacheReferences
from registration.scratch import Scratch
from transport import Transport, TransportError

log = logging.getLogger(__name__)

BackendOptions = Mapping[str, Mapping[str, str]]

_NETWORK_ONLY = "TLS=^sm"


def rehearse_pulls(
    transport: Transport, partners: Sequence[Callable[[], Transport]], *, lends: bool, pulls: bool
) -> list[object]:
    """Pull from, and lend to, a transport that each of ``partners`` opens for it; closed again.

    Returns what must live as long as ``transport``: pages that are registered with it.
    """
    began = time.monotonic()
    kept: list[object] = []
    try:
        ours = PagedTransport.on(transport)
        kept.append(ours.page)
        for open_partner in partners:
            partner = open_partner()
            kept.append(partner)  # until it is closed nothing of it may be collected
            theirs = PagedTransport.on(partner)
            kept.append(theirs.page)
            if pulls:
                rehearse(ours, theirs)
            if lends:
                rehearse(theirs, ours)
            partner.close()
            del kept[1:]
    except Exception as error:  # noqa: BLE001 - an engine that can serve must start
        log.warning(
            "pdconn: the rehearsal failed, so the first request takes longer: %s: %s",
            type(error).__name__,
            error,
        )
    else:
        log.info(
            "pdconn: rehearsed: lends=%s pulls=%s partners=%d seconds=%.3f",
            lends,
            pulls,
            len(partners),
            time.monotonic() - began,
        )
    return kept


def network_only(
    options: BackendOptions, environ: Mapping[str, str] = os.environ
) -> BackendOptions | None:
    """UCX options of a partner that is reached as one on another host is: without shared memory.

    UCX picks its protocols once for each kind of connection.  None where the user's own list
    of transports decides.

    >>> network_only({}, {})
    {'UCX': {'engine_config': 'TLS=^sm'}}
    """
    ours = options.get("UCX", {})
    settings = [word for word in ours.get("engine_config", "").split(",") if word.strip()]
    keys = {word.partition("=")[0].strip().removeprefix("UCX_") for word in settings}
    if "TLS" in keys or "UCX_TLS" in environ:
        return None
    return {**options, "UCX": {**ours, "engine_config": ",".join([*settings, _NETWORK_ONLY])}}


def warm_up_of(
    places: tuple[Place, ...], references: KVCacheReferences, transport: Transport
) -> tuple[WarmUp, Scratch | None]:
    """The lenders to warm, and the page that probe reads go to."""
    if not places:
        return WarmUp(), None
    try:
        scratch = _scratch_beside(references)
        transport.register([scratch.memory])
    except (TransportError, MemoryError) as error:
        log.warning(
            "pdconn: warm_peers: scratch registration failed; "
            "peers are connected without a probe read: %s",
            error,
        )
        return WarmUp(places), None
    return WarmUp(places, scratch.memory), scratch


def _scratch_beside(references: KVCacheReferences) -> Scratch:
    """A page on the device of the KV memory.

    Raises:
        MemoryError: a GPU that has none to spare.
    """
    try:
        return Scratch.on(references.memories()[0].device)
    except RuntimeError as error:
        raise MemoryError(str(error)) from error
