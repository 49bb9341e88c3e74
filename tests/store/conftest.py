"""A server of objects for tests of the shelf ``obj``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdconn.store.shelf.obj.bucket import BucketPlace
from tests.store.shelves.obj.s3_server import S3Server, credentials, s3_server


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    """moto's server, in a process of its own."""
    with s3_server() as made:
        yield made


@pytest.fixture
def place(server: S3Server) -> Iterator[BucketPlace]:
    """An empty bucket, and credentials for it in the environment."""
    with credentials():
        yield server.new_place()
