"""Large objects of a bucket, through NIXL's OBJ back end, or boto3 where that does not load.

The plugin of ``nixl-cu13`` 1.5.1 needs a library of NVIDIA's cuObject, which no wheel has, and
``nixl-cu13`` is what torch's wheels for CUDA 13 ask for.  A store must not depend on that: boto3
moves the same bytes, with one copy more and one request at a time.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Protocol

from pdconn.store.shelf.obj.bucket import Bucket
from pdconn.store.store_errors import ShelfFailure
from transport.errors import TransportError, TransportUnavailable
from transport.nixl.objects import NixlObjects

_log = logging.getLogger(__name__)

_TRANSFER_S = 10.0


class Objects(Protocol):
    """Objects by their keys below the bucket's prefix; one thread."""

    def put_object(self, key: str, pieces: Sequence[memoryview]) -> None: ...
    def read_objects(self, reads: Sequence[tuple[str, int, memoryview]]) -> None: ...
    def close(self) -> None: ...


class Boto3Objects:
    """Objects of a bucket by its boto3 client, one request after another."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def put_object(self, key: str, pieces: Sequence[memoryview]) -> None:
        """Make or replace an object of all pieces."""
        self._bucket.put_object(key, pieces)

    def read_objects(self, reads: Sequence[tuple[str, int, memoryview]]) -> None:
        """Fill each buffer from its offset in an object."""
        for key, offset, into in reads:
            if into:  # a range of no bytes cannot be asked for
                self._bucket.read_into(key, offset, into)

    def close(self) -> None:
        """Does nothing: the client belongs to the bucket."""


class BucketData:
    """The large objects of a bucket, for one thread.

    NIXL is loaded at the first transfer, and its agent is made anew when credentials have changed,
    as temporary ones do.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._options: dict[str, str] = {}
        self._objects: Objects | None = None

    def put_object(self, key: str, pieces: list[memoryview]) -> None:
        """Make an object.

        Raises:
            ShelfFailure: it is not known to be there.
        """
        self._opened().put_object(key, pieces)

    def read_objects(self, reads: list[tuple[str, int, memoryview]]) -> None:
        """Fill each buffer from its offset in an object.

        Raises:
            ShelfFailure: an object is missing, or cannot be read now.
        """
        self._opened().read_objects(reads)

    def close(self) -> None:
        """Close the agent."""
        if self._objects is not None:
            self._objects.close()
            self._objects = None

    def _opened(self) -> Objects:
        options = self._bucket.nixl_options()
        if self._objects is None or options != self._options:
            self.close()
            self._objects = self._made(options)
            self._options = options
        return self._objects

    def _made(self, options: dict[str, str]) -> Objects:
        name = f"pdconn-obj-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            return _BucketObjects(NixlObjects(name, options, _TRANSFER_S), self._bucket)
        except TransportUnavailable as error:
            _warn_once(str(error))
            return Boto3Objects(self._bucket)
        except TransportError as error:
            raise ShelfFailure(f"cannot reach {self._bucket.place}: {error}") from error


class _BucketObjects:
    """NIXL's objects of a bucket, by their keys below its prefix."""

    def __init__(self, objects: NixlObjects, bucket: Bucket) -> None:
        self._objects = objects
        self._bucket = bucket
        self._prefix = bucket.place.prefix

    def put_object(self, key: str, pieces: Sequence[memoryview]) -> None:
        with self._bucket.moved_by_nixl("make", key):
            self._objects.put_object(self._prefix + key, pieces)

    def read_objects(self, reads: Sequence[tuple[str, int, memoryview]]) -> None:
        with self._bucket.moved_by_nixl("read", reads[0][0]):
            self._objects.read_ranges([(self._prefix + key, at, into) for key, at, into in reads])

    def close(self) -> None:
        self._objects.close()


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("pdconn: store: objects are moved by boto3, not by NIXL: %s", reason)
