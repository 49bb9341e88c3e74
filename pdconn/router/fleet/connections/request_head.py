"""The head of a request to an engine, as bytes."""

from __future__ import annotations

from multidict import CIMultiDict

from pdconn.router.fleet.connections.engine_pool import Origin


def request_head(
    method: str, origin: Origin, path: str, headers: CIMultiDict[str], length: int | None
) -> bytes:
    """A request's first line and headers.

    Args:
        length: of the body; None for a request without one.

    Raises:
        ValueError: the path or a header would add a line of its own.

    >>> from pdconn.router.fleet.connections.engine_pool import origin_of
    >>> request_head("GET", origin_of("http://e:80/a"), "/health", CIMultiDict(A="b"), None)
    b'GET /a/health HTTP/1.1\\r\\nHost: e\\r\\nA: b\\r\\nAccept: */*\\r\\n\\r\\n'
    """
    lines = [f"{method} {origin.path}{path} HTTP/1.1", f"Host: {origin.host_header}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if "Accept" not in headers:
        lines.append("Accept: */*")
    if length is not None:
        lines.append(f"Content-Length: {length}")
    head = "\r\n".join(lines)
    if not head.count("\n") == head.count("\r") == len(lines) - 1:
        raise ValueError("a header or the path contains a line break")
    return head.encode("utf-8", "surrogateescape") + b"\r\n\r\n"
