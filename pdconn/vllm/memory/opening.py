"""Opens a worker's transport, and chooses the cores of its threads."""

from __future__ import annotations

import logging
import os

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from pdconn.sidechannel.affinity import spare_cores, wider_affinity
from pdconn.sidechannel.kv_card import AUTO
from pdconn.vllm.config import Settings
from pdconn.vllm.memory.card import kv_card
from pdconn.vllm.memory.cores import bound_cores
from pdconn.vllm.memory.sleep import options_for_sleep
from pdconn.vllm.memory.warm import BackendOptions
from transport import Transport
from transport.choose import choose, ucx_options
from transport.nixl.transport import NixlTransport
from transport.ucx.transport import UcxTransport

log = logging.getLogger(__name__)


def open_transport(settings: Settings, config: VllmConfig, name: str, *, lends: bool) -> Transport:
    """Open the configured transport; called on the model's thread.

    Raises:
        TransportUnavailable: it is not available here, or its options are invalid.
        ConfigError: ``kv_interface`` names a card that this machine does not have.
    """
    drive_on = cores_beside_model(settings, config)
    card = kv_card(settings)
    is_obeyed = card.devices or settings.kv_interface == AUTO
    log.log(logging.INFO if is_obeyed else logging.WARNING, "pdconn: %s", card.sentence)

    def nixl() -> Transport:
        return open_nixl(settings, config, name, lends=lends, drive_on=drive_on)

    def ucx() -> Transport:
        options = ucx_options(settings.backend_options)
        if card.devices:
            options["NET_DEVICES"] = ",".join(card.devices)
        return UcxTransport(name, options=options, huge_pages=settings.huge_pages)

    with wider_affinity():
        transport, choice = choose(settings.transport, {"nixl": nixl, "ucx": ucx})
    facts = ", ".join(f"{key} {value}" for key, value in transport.describe().items())
    log.info("pdconn: transport: %s: %s", choice, facts)
    return transport


def open_nixl(
    settings: Settings,
    config: VllmConfig,
    name: str,
    options: BackendOptions | None = None,
    *,
    lends: bool,
    drive_on: frozenset[int] | None = frozenset(),
) -> NixlTransport:
    """Open NIXL by ``settings``, or with other ``options`` of its backends.

    Raises:
        TransportUnavailable: it is not available here, or its options are invalid.
    """
    options = settings.backend_options if options is None else options
    if lends and config.model_config.enable_sleep_mode:
        options = options_for_sleep(options)
    return NixlTransport(
        name,
        backends=settings.backends,
        backend_options=options,
        net_devices=kv_card(settings).devices,
        huge_pages=settings.huge_pages,
        drive_on=drive_on,
    )


def cores_beside_model(settings: Settings, config: VllmConfig) -> frozenset[int] | None:
    """Cores for a thread that spins, as returned by :func:`spare_cores`."""
    if settings.progress_cores == 0:
        return frozenset()
    ranks = config.parallel_config.world_size
    threads = torch.get_num_threads() if current_platform.is_cpu() else 1
    own = os.sched_getaffinity(0)
    parent = os.sched_getaffinity(os.getppid())
    spare = spare_cores(own, parent, bound_cores(own, parent, ranks), ranks * threads)
    if settings.progress_cores and spare is not None and not spare:
        log.warning(
            "pdconn: progress_cores=1, but the model uses every core: %s; NIXL's progress thread "
            "does not spin",
            sorted(parent),
        )
    return spare
