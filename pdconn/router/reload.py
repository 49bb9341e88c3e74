"""Reloads on SIGHUP: the fleet, the keys of clients and of engines, the certificate.

Each is replaced as a whole or not at all: a file with a mistake is named in the log, and the router
continues with its previous content.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from pdconn.router.access.api_keys import ApiKeys, EngineKey
from pdconn.router.access.listener_tls import ServerTls
from pdconn.router.fleet.file import read_fleet
from pdconn.router.fleet.sources import FleetWatch
from pdconn.router.router_errors import BadSetting

log = logging.getLogger(__name__)


class ReloadableFiles(Protocol):
    """Something read from files, which it reads again."""

    def reload_files(self) -> None:
        """Read the files again.

        Raises:
            BadSetting: a file is invalid; the previous content stays.
        """


@dataclass(frozen=True, slots=True)
class Reloader:
    """Reloads the files of a running router; None for files that are not configured."""

    fleet_file: str | None
    watch: FleetWatch
    keys: ApiKeys | None
    engine_key: EngineKey
    tls: ServerTls | None

    async def reload_all(self) -> tuple[BadSetting, ...]:
        """Reload everything; returns the mistakes, which are also logged."""
        mistakes: list[BadSetting] = []
        if self.fleet_file is not None:
            try:  # the watch reports a mistake once, not on each reload
                await asyncio.to_thread(read_fleet, self.fleet_file)
            except BadSetting as error:
                mistakes.append(error)
        members = await self.watch.refresh_now()
        configured: tuple[ReloadableFiles | None, ...] = (self.keys, self.engine_key, self.tls)
        for one in configured:
            try:
                if one is not None:
                    one.reload_files()
            except BadSetting as error:
                mistakes.append(error)
        for mistake in mistakes:
            log.error("pdconn: not reloaded, keeping the previous content: %s", mistake)
        log.log(
            logging.WARNING if mistakes else logging.INFO,
            "pdconn: %s engines=%d keys=%d mistakes=%d",
            "reloaded in part" if mistakes else "reloaded",
            len(members),
            0 if self.keys is None else len(self.keys),
            len(mistakes),
        )
        return tuple(mistakes)
