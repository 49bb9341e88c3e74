"""The relevant options of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdconn.sidechannel.advertise import VARIABLES
from pdconn.vllm.nixl.connector_registry import MODULES, NAMES, REPLACED

EXTRA = "kv_connector_extra_config"
DEFAULT_PORT = 5600
DEFAULT_HOST = "localhost"
ADDRESSES = ("VLLM_NIXL_SIDE_CHANNEL_HOST", *VARIABLES)
AN_ADDRESS = "192.0.2.1"
"""Placeholder for a value that only the shell or the cluster knows (RFC 5737, documentation)."""
_OF_PROGRAMS = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables with paths of programs: doctor starts some on behalf of the engine."""
_MULTI = "MultiConnector"
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class GivenConfig:
    """The configuration with which an engine is to be started.

    Attributes:
        transfer: the value of ``--kv-transfer-config``; None if missing.
        options: other examined options, by name with underscores.
        environ: environment variables set for it.
        as_nixl: whether NixlConnector's name selects ours (``PDCONN_AS_NIXL=1``).
        name: name of its container or service; "" without one.
        in_container: whether it has a container's files and addresses.
        is_host_network: whether its container has this host's addresses.
        inherits: whether it also gets the environment of the starting shell.
        guessed: variables whose values only the shell or the cluster knows.
        ignored: arguments without effect in vLLM, one sentence each.
    """

    transfer: Mapping[str, Any] | None
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    as_nixl: bool = False
    name: str = ""
    in_container: bool = False
    is_host_network: bool = False
    inherits: bool = True
    guessed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def ours(self) -> Mapping[str, Any] | None:
        """The entry of our connector: the whole, or one of MultiConnector's."""
        if self.transfer is None or self.transfer.get("kv_connector") != _MULTI:
            return self.transfer
        extra = self.transfer.get(EXTRA)
        children = extra.get("connectors") if isinstance(extra, Mapping) else None
        entries = [child for child in children or () if isinstance(child, Mapping)]
        named = [child for child in entries if self.names_ours(child)]
        meant = [child for child in entries if child.get("kv_connector") in NAMES]
        return next(iter(named or meant), None)

    def names_ours(self, entry: Mapping[str, Any]) -> bool:
        """Whether vLLM loads our connector for an entry."""
        name, path = entry.get("kv_connector"), entry.get("kv_connector_module_path")
        if path is None:
            return name in NAMES or (self.as_nixl and name in REPLACED)
        return name in MODULES.get(str(path), ())

    @property
    def lends(self) -> bool:
        """Whether its role has a side channel."""
        return (self.transfer or {}).get("kv_role") in ("kv_producer", "kv_both")

    @property
    def num_ports(self) -> int:
        """Ports of side channels on this host: one per local data-parallel rank."""
        for name in ("data_parallel_size_local", "data_parallel_size"):
            size = str(self.options.get(name, ""))
            if size.isdecimal() and 0 < int(size) <= _MOST_RANKS:
                return int(size)
        return 1

    @property
    def extra(self) -> Mapping[str, Any]:
        """Our ``kv_connector_extra_config``."""
        extra = (self.ours or {}).get(EXTRA, {})
        return extra if isinstance(extra, Mapping) else {}

    @property
    def has_addresses_of_host(self) -> bool:
        """Whether it listens at addresses of the host that starts it."""
        knows_them = not set(ADDRESSES) & set(self.guessed)
        return knows_them and (self.is_host_network or not self.in_container)

    def engine_environment(self, outer: Mapping[str, str]) -> Mapping[str, str]:
        """All its variables; ``outer`` is the environment of the starting shell."""
        kept = outer if self.inherits else {k: v for k, v in outer.items() if k in _OF_PROGRAMS}
        return {**kept, **self.environ}
