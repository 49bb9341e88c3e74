"""Binds the sockets that a router listens on."""

from __future__ import annotations

import socket

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import CannotListen


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        CannotListen: the address is not available.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise CannotListen(host, port, error.strerror or str(error)) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise CannotListen(host, port, error.strerror or str(error)) from error
    return sock


def bind_admin(config: ProxyConfig) -> socket.socket:
    """A bound socket for the admin pages."""
    try:
        return bind(config.listen.admin_host, config.listen.effective_admin_port)
    except CannotListen as error:
        raise cannot_listen_admin(config, error.__cause__ or error) from error


def cannot_listen_admin(config: ProxyConfig, error: BaseException) -> CannotListen:
    """The error for an unavailable address of the admin pages."""
    why = f"{getattr(error, 'strerror', None) or error} (for the admin pages; see --admin-port)"
    return CannotListen(config.listen.admin_host, config.listen.effective_admin_port, why)


def url_of(scheme: str, host: str, sock: socket.socket) -> str:
    """The URL at which a bound socket is reached."""
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{sock.getsockname()[1]}"
