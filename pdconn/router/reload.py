"""What SIGHUP reads again: the fleet, the keys of clients and of engines, the certificate.

Each is replaced whole or stays as it is: a file with a mistake is named in the log, and the
router goes on with what it had.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from pdconn.router.access.keys import ApiKeys, EngineKey
from pdconn.router.access.tls import ServerTls
from pdconn.router.errors import BadSetting
from pdconn.router.fleet.file import read_fleet
from pdconn.router.fleet.sources import FleetWatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reloader:
    """Reads the files of a running router again; those that it has not are None."""

    fleet_file: str | None
    watch: FleetWatch
    keys: ApiKeys | None
    engine_key: EngineKey
    tls: ServerTls | None

    async def reload(self) -> tuple[BadSetting, ...]:
        """Read everything again; returns the mistakes, each of which is logged too."""
        mistakes: list[BadSetting] = []
        if self.fleet_file is not None:
            try:  # the watch mentions a mistake once, not each time it is asked
                await asyncio.to_thread(read_fleet, self.fleet_file)
            except BadSetting as error:
                mistakes.append(error)
        members = await self.watch.refresh_now()
        for one in (self.keys, self.engine_key, self.tls):
            try:
                if one is not None:
                    one.reload()
            except BadSetting as error:
                mistakes.append(error)
        for mistake in mistakes:
            log.error("pdconn: not reloaded, keeping what was: %s", mistake)
        log.log(
            logging.WARNING if mistakes else logging.INFO,
            "pdconn: %s engines=%d keys=%d mistakes=%d",
            "reloaded only what has no mistake" if mistakes else "reloaded",
            len(members),
            0 if self.keys is None else len(self.keys),
            len(mistakes),
        )
        return tuple(mistakes)
