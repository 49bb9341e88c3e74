"""moto's server, which handles one PUT at a time.

    python -m tests.store.shelves.obj.exclusive_moto -H HOST -p PORT

moto looks whether there is an object, and then writes it, without a lock: of two PUTs at once with
``If-None-Match: *`` both succeed, which S3 excludes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which threads call one after the other."""
    lock = threading.Lock()

    @wraps(function)
    def alone(*arguments: Any, **named: Any) -> Any:
        with lock:
            return function(*arguments, **named)

    return alone


if __name__ == "__main__":
    from moto.s3.responses import S3Response
    from moto.server import main

    S3Response.put_object = one_at_a_time(S3Response.put_object)  # type: ignore[method-assign]
    main()
