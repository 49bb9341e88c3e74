"""A bucket of an S3-compatible object store, through boto3.

NIXL moves the large objects (``pdconn.store.shelf.obj.data``).  It cannot create an object only
where there is none, tell a missing object from a failure, or remove one: boto3 does that.  boto3
finds the credentials (environment, ``~/.aws``, role of the machine); no setting has any.

After a failure of the network calls fail at once for a few seconds, so that look-ups do not queue
behind a server that is down.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from pdconn.store.breaker import Breaker
from pdconn.store.store_errors import ShelfFailure, StoreError
from transport.errors import TransportError

_CONNECT_S, _ANSWER_S = 2, 4
_PAUSE_S = 5.0
_THREADS = "8"
"""Connections of one thread's agent, on which it reads large ranges side by side."""
_GONE = (404,)
_THERE = (409, 412)


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """A bucket and a prefix in it (ends with ``/`` or is empty); no endpoint for AWS."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None

    @classmethod
    def from_path(cls, path: str, endpoint: str | None, region: str | None) -> BucketPlace:
        """From ``bucket`` or ``bucket/prefix``."""
        bucket, _, prefix = path.partition("/")
        return cls(bucket, f"{prefix}/" if prefix else "", endpoint, region)

    @property
    def is_virtual(self) -> bool:
        """Whether the bucket is part of the host's name: at AWS, unless TLS cannot match it."""
        return self.endpoint is None and "." not in self.bucket

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


class Bucket:
    """Calls for small objects, by keys below the prefix.  Any thread.

    Raises:
        StoreError: boto3 is missing, there are no credentials, or no such bucket.
        ShelfFailure: it cannot be reached.
    """

    def __init__(self, place: BucketPlace) -> None:
        self.place = place
        self._breaker = Breaker(_PAUSE_S, _PAUSE_S)
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise StoreError("shelf obj: boto3 is missing: pip install '.[s3]'") from error
        config = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_ANSWER_S,
            retries={"total_max_attempts": 2, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "virtual" if place.is_virtual else "path"},
        )
        with self._failures("open", ""):
            self._session: Any = boto3.Session()
            self.region = place.region or self._session.region_name or "us-east-1"
            self._client: Any = self._session.client(
                "s3", endpoint_url=place.endpoint, region_name=self.region, config=config
            )
        if self._session.get_credentials() is None:
            raise StoreError(
                f"{place}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "configure ~/.aws"
            )
        if not self._is_found("open", "", "head_bucket"):
            raise StoreError(f"{place}: no such bucket")

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        return self._is_found("look for", key, "head_object", Key=self._full(key))

    def read_object(self, key: str, most_nbytes: int) -> bytes | None:
        """At most ``most_nbytes + 1`` bytes of an object; None if there is none."""
        with self._failures("read", key):
            try:
                answer = self._client.get_object(Bucket=self.place.bucket, Key=self._full(key))
            except self._client.exceptions.ClientError as error:
                if _status(error) in _GONE:
                    return None
                raise
            with answer["Body"] as body:
                data: bytes = body.read(most_nbytes + 1)
            return data
        raise AssertionError

    def put_new(self, key: str, data: bytes) -> bool:
        """Make an object; False if there is one already (maybe ours, of an earlier try)."""
        with self._failures("make", key):
            try:
                self._client.put_object(
                    Bucket=self.place.bucket, Key=self._full(key), Body=data, IfNoneMatch="*"
                )
            except self._client.exceptions.ClientError as error:
                if _status(error) in _THERE:
                    return False
                raise
        return True

    def put_object(self, key: str, pieces: Sequence[memoryview]) -> None:
        """Make or replace an object of all pieces, one after another.

        Raises:
            ShelfFailure: it is not known to be there.
        """
        with self._failures("make", key):
            self._client.put_object(
                Bucket=self.place.bucket, Key=self._full(key), Body=b"".join(pieces)
            )

    def read_into(self, key: str, offset: int, into: memoryview) -> None:
        """Fill a buffer from an offset in an object.

        Raises:
            ShelfFailure: the object is missing, ends before, or cannot be read now.
        """
        wanted = f"bytes={offset}-{offset + len(into) - 1}"
        with self._failures("read", key):
            answer = self._client.get_object(
                Bucket=self.place.bucket, Key=self._full(key), Range=wanted
            )
            with answer["Body"] as body:
                data: bytes = body.read(len(into) + 1)
        if len(data) != len(into):  # an error of this object: the breaker stays closed
            seen = f"{wanted}: expected {len(into)} bytes, got {len(data)}"
            raise ShelfFailure(f"cannot read {self.place}{key}: {seen}")
        into[:] = data

    def remove_object(self, key: str) -> None:
        """Remove an object.  Idempotent."""
        with self._failures("remove", key):
            self._client.delete_object(Bucket=self.place.bucket, Key=self._full(key))

    def _is_found(self, action: str, key: str, call: str, **given: str) -> bool:
        with self._failures(action, key):
            try:
                getattr(self._client, call)(Bucket=self.place.bucket, **given)
            except self._client.exceptions.ClientError as error:
                if _status(error) in _GONE:
                    return False
                raise
        return True

    def _full(self, key: str) -> str:
        return self.place.prefix + key

    @contextmanager
    def moved_by_nixl(self, action: Literal["make", "read"], key: str) -> Iterator[None]:
        """Guards a transfer of objects by NIXL with the breaker, as all calls of boto3 are.

        Raises:
            ShelfFailure: the last call failed a moment ago, or the transfer fails.
        """
        where = self._tries(action, key)
        try:
            yield
            self._breaker.succeeded()
        except TransportError as error:
            # NIXL does not say why: a read may fail for a missing object while the server answers.
            if action == "make":
                self._failed()
            raise ShelfFailure(f"{where}: {error}") from error

    def _tries(self, action: str, key: str) -> str:
        """The beginning of a call's error message.

        Raises:
            ShelfFailure: the last call failed, and it is too early for another.
        """
        where = f"cannot {action} {self.place}{key}"
        now = time.monotonic()
        if not self._breaker.allows(now):
            left_s = self._breaker.left_s(now)
            raise ShelfFailure(f"{where}: the last call failed; next try in {left_s:.1f} s")
        return where

    @contextmanager
    def _failures(self, action: str, key: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        where = self._tries(action, key)
        try:
            yield
            self._breaker.succeeded()
        except ClientError as error:
            if _status(error) >= 500:
                self._failed()
            else:  # the server answers
                self._breaker.succeeded()
            raise ShelfFailure(f"{where}: {_code(error)}") from error
        except (BotoCoreError, HTTPError, OSError, ValueError) as error:
            self._failed()
            raise ShelfFailure(f"{where}: {type(error).__name__}: {error}") from error

    def _failed(self) -> None:
        """Open the breaker: the network or the server failed."""
        self._breaker.failed(time.monotonic())

    def nixl_options(self) -> dict[str, str]:
        """Parameters of NIXL's back end, with the present credentials.  Calls no server.

        Raises:
            ShelfFailure: there are no credentials now.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            found = self._session.get_credentials().get_frozen_credentials()
        except (BotoCoreError, ClientError, OSError) as error:
            raise ShelfFailure(f"cannot get credentials for {self.place}: {error}") from error
        options = {
            "bucket": self.place.bucket,
            "region": self.region,
            "access_key": found.access_key,
            "secret_key": found.secret_key,
            "num_threads": _THREADS,
            "req_checksum": "required",
            "resp_checksum": "required",
            "use_virtual_addressing": "true" if self.place.is_virtual else "false",
        }
        if found.token:
            options["session_token"] = found.token
        if self.place.endpoint:
            options["endpoint_override"] = self.place.endpoint
            options["scheme"] = urlsplit(self.place.endpoint).scheme
        if "AWS_CA_BUNDLE" in os.environ:
            options["ca_bundle"] = os.environ["AWS_CA_BUNDLE"]
        return options


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: Any) -> str:
    found = error.response.get("Error", {})
    return f"{_status(error)} {found.get('Code', '')} {found.get('Message', '')}".strip()


_opening = threading.Lock()
_opened: dict[tuple[int, BucketPlace], Bucket] = {}
_refused: dict[BucketPlace, tuple[float, str]] = {}


def open_bucket(place: BucketPlace) -> Bucket:
    """The bucket, one object for all threads of the process.

    Raises:
        StoreError: see :class:`Bucket`.
        ShelfFailure: it cannot be reached, or could not a moment ago.
    """
    key = os.getpid(), place
    with _opening:
        if key not in _opened:
            until, why = _refused.get(place, (0.0, ""))
            if time.monotonic() < until:
                raise ShelfFailure(why)
            try:
                _opened[key] = Bucket(place)
            except ShelfFailure as error:
                _refused[place] = time.monotonic() + _PAUSE_S, str(error)
                raise
        return _opened[key]
