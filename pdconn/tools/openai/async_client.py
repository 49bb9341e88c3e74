"""Pages and completions of one OpenAI-compatible server, over an aiohttp session."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

MAX_PAGE_NBYTES = 16 << 20
OK = 200


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to GET.

    Attributes:
        date: the Date header.
        asked_s, answered_s: seconds since the epoch by our clock.
    """

    status: int
    body: bytes
    date: str | None
    asked_s: float
    answered_s: float

    @property
    def text(self) -> str:
        """The body; empty where the status is not 200."""
        return self.body.decode(errors="replace") if self.status == OK else ""


class AsyncClient:
    """A client of the server at ``url``; many requests may share it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def get_page(self, path: str, max_nbytes: int = MAX_PAGE_NBYTES) -> Page:
        """Get a page, truncated shortly after ``max_nbytes``.

        Raises:
            aiohttp.ClientError, OSError: the server does not answer.
        """
        asked_s = time.time()
        async with self._session.get(f"{self.url}{path}", allow_redirects=False) as response:
            answered_s = time.time()
            body = b""
            async for piece in response.content.iter_chunked(1 << 16):
                body += piece
                if len(body) > max_nbytes:
                    break
            date = response.headers.get("Date")
            return Page(response.status, body, date, asked_s, answered_s)

    @asynccontextmanager
    async def post_completion(
        self, payload: str, headers: Mapping[str, str] | None = None, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Request a completion; ``more`` are arguments for aiohttp, such as ``timeout``.

        Raises:
            aiohttp.ClientError, OSError: the server does not answer.
        """
        kind = {"Content-Type": "application/json", **(headers or {})}
        url = f"{self.url}/v1/completions"
        async with self._session.post(url, data=payload, headers=kind, **more) as response:
            yield response
