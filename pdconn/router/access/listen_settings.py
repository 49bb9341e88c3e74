"""The settings of the router's listeners: addresses, keys, TLS and what clients may see."""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.router.access.cors import check_origin
from pdconn.router.access.listener_tls import ServerTls
from pdconn.router.router_errors import BadSetting
from pdconn.router.router_options import CheckedSettings, each, option, switch

ADMIN_ABOVE = 1000
"""Distance of the admin pages' default port above ``port``."""
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ListenSettings(CheckedSettings):
    """Where the router listens, and what clients may do and see.  Port 0 takes any free one."""

    host: str = option("127.0.0.1", says="address to listen on")
    port: int = option(8000, says="port to listen on; 0: any free one", parse=int)
    admin_host: str = option("127.0.0.1", says="address of the admin pages")
    admin_port: int | None = option(
        None,
        "PORT",
        says="port of the admin pages; 0: any free one",
        parse=int,
        unset=f"{ADMIN_ABOVE} above --port",
    )
    api_key_file: str | None = option(
        None,
        "FILE",
        says="keys of clients, one per line; each request must send one as "
        "'Authorization: Bearer KEY' (without it no key is needed)",
        is_reloaded=True,
    )
    forward_authorization: bool = switch(
        "pass the client's key on to engines (without --api-key-file it is always passed on)"
    )
    engine_key_file: str | None = option(
        None,
        "FILE",
        says="the key that engines require; the proxy sends it when it asks for their models, and "
        "in place of clients' keys with --api-key-file and without --forward-authorization",
        is_reloaded=True,
    )
    tls_cert: str | None = option(
        None, "FILE", says="certificate chain for clients, PEM", is_reloaded=True
    )
    tls_key: str | None = option(
        None, "FILE", says="its key, PEM without passphrase", is_reloaded=True
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "ORIGIN",
        each(check_origin),
        "let pages of these origins send requests from a browser, such as https://chat.example; "
        "*: all origins",
        flag="--cors-origin",
        several="+",
    )
    show_engines: bool = switch(
        "show engines' addresses to clients: X-Pdconn-Engine, reasons of a 503, /health"
    )

    def check_together(self) -> None:
        if not 0 <= self.port <= _LAST_PORT:
            raise BadSetting("--port", f"a number from 0 to {_LAST_PORT}", self.port)
        if not 0 <= self.effective_admin_port <= _LAST_PORT:
            expected = f"a number from 0 to {_LAST_PORT} (default: {ADMIN_ABOVE} above --port)"
            raise BadSetting("--admin-port", expected, self.effective_admin_port)
        if 0 < self.port == self.effective_admin_port and self.host == self.admin_host:
            raise BadSetting("--admin-port", "another port than --port", self.port)
        if self.tls_cert is None and self.tls_key is not None:
            raise BadSetting("--tls-cert", "a file beside --tls-key", None)
        if self.tls_key is None and self.tls_cert is not None:
            raise BadSetting("--tls-key", "a file beside --tls-cert", None)
        if self.forward_authorization and self.api_key_file is None:
            expected = "--api-key-file beside it; without keys Authorization is always passed on"
            raise BadSetting("--forward-authorization", expected, None)

    @property
    def effective_admin_port(self) -> int:
        """The port of the admin pages; 0 takes any free one."""
        if self.admin_port is not None:
            return self.admin_port
        return 0 if self.port == 0 else self.port + ADMIN_ABOVE

    @property
    def shows_models(self) -> bool:
        """Whether clients may see the router's list of models: only if their keys are checked."""
        return self.engine_key_file is None or self.api_key_file is not None

    @property
    def passes_authorization(self) -> bool:
        """Whether engines receive the client's ``Authorization``: unless it is checked here."""
        return self.api_key_file is None or self.forward_authorization

    def make_tls(self) -> ServerTls | None:
        """The TLS of the client listener; None for plain connections.

        Raises:
            BadSetting: a file is missing or invalid.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key)
