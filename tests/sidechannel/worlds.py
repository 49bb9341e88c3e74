"""Every way to secure a connection, with certificates that are good and bad."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pdconn.sidechannel.security import Security
from tests.fakes.credentials import FOREIGN, OPEN, SHARED, Authority


class Worlds:
    """Every way to secure a connection, with files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.ours = Authority(folder / "ours")
        self.foreign = Authority(folder / "foreign")
        self.engine = self.ours.sign("engine", "localhost", "127.0.0.1")
        self.tls = Security(tls=self.engine)
        self.both = Security(SHARED.secret, self.engine)
        stolen = replace(self.foreign.sign("engine", "localhost"), ca=self.ours.file)
        self.by_name = {
            "plain": OPEN,
            "secret": SHARED,
            "other": FOREIGN,
            "tls": self.tls,
            "both": self.both,
            "both other": Security(FOREIGN.secret, self.engine),
            "no certificate": self.tls,
            "foreign": Security(tls=self.foreign.sign("whole", "localhost")),
            "of foreign": Security(tls=stolen),
            "elsewhere": Security(tls=self.ours.sign("elsewhere", "elsewhere.example")),
            "expired": Security(tls=self.ours.sign("expired", "localhost", expired=True)),
        }
