"""Rows as files whose bytes NIXL's POSIX back end moves; all else is as with plain files."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from typing import Literal

from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.interface import Buffer
from pdconn.store.shelf.transfer import FileTransfer, address_of
from pdconn.store.store_errors import RowDamaged, ShelfFailure, StoreError
from transport.errors import TransportError, TransportUnavailable
from transport.nixl.posix_files import NixlFiles


class NixlTransfer(FileTransfer):
    """Reads and writes of one thread, through an agent of its own.

    Raises:
        StoreError: NIXL cannot be used here.
    """

    def __init__(self) -> None:
        super().__init__(False)
        try:
            self._files = NixlFiles(f"pdconn-store-{os.getpid()}-{secrets.token_hex(4)}")
        except TransportUnavailable as error:
            raise StoreError(f"shelf posix: {error}") from error
        except TransportError as error:
            raise ShelfFailure(f"shelf posix: {error}") from error

    def read_ranges(
        self, fd: int, path: str, ranges: Sequence[tuple[int, Buffer]], *, is_hot: bool
    ) -> None:
        """Fill each buffer from its offset; as in :class:`FileTransfer`."""
        # NIXL reports a file that is too short as a device error.
        nbytes = os.fstat(fd).st_size
        if any(at + len(buffer) > nbytes for at, buffer in ranges):
            raise RowDamaged(f"{path}: ends at {nbytes}, before a range does")
        self._move("READ", fd, ranges)

    def write_ranges(self, fd: int, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Write each buffer at its offset; as in :class:`FileTransfer`."""
        self._move("WRITE", fd, ranges)

    def close(self) -> None:
        """Close the agent."""
        self._files.close()

    def _move(
        self, kind: Literal["READ", "WRITE"], fd: int, ranges: Sequence[tuple[int, Buffer]]
    ) -> None:
        runs = [(at, address_of(buffer), len(buffer)) for at, buffer in ranges if len(buffer)]
        try:
            self._files.transfer(kind, fd, runs)
        except TransportError as error:
            raise OSError(errno.EIO, str(error)) from error


class NixlPosixShelf(FilesShelf):
    """Rows below ``root``, moved by NIXL; the files are those of :class:`FilesShelf`.

    Raises:
        StoreError: the root cannot be used, or NIXL cannot.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root, direct_io=False)
        self._moving = NixlTransfer()
        self._transfer = self._moving

    def close(self) -> None:
        """Close the agent."""
        self._moving.close()
        super().close()
