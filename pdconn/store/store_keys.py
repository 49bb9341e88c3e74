"""The key file of an encrypted store: a secret for names, and keys for bytes.

::

    # anything after a number sign
    names 0f3b…        64 hex digits: what names rows; keep it when keys are exchanged
    key   9a41…        the first key encrypts
    key   c07d…        all of them decrypt: keep a key until its rows are gone

Like the other secrets it is a file of its own, which others can neither read nor write, and no
error shows what is in it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial

from pdconn.sidechannel.credentials import SecurityError, read_private
from pdconn.store.format.row_names import RowNames
from pdconn.store.format.seals import SALT_NBYTES, RowKeys
from pdconn.store.store_errors import StoreSettingError

FIELD = "store.key_file"
MOST_KEYS = 16
_LINE = re.compile(rb"(names|key)[ \t]+([0-9A-Fa-f]{64})")
_EXPECTED = "lines of names or key and 64 hex digits"


@dataclass(frozen=True, slots=True, eq=False)
class StoreKeys:
    """What a key file holds; the names alone where rows are not encrypted."""

    names: RowNames
    rows: RowKeys | None = None


def load_keys(path: str | None, field: str = FIELD) -> StoreKeys:
    """The keys in a file that only its owner may write, and only owner and group may read.

    Args:
        path: None for a store that is not encrypted.
        field: what errors call the file.

    Raises:
        StoreSettingError: it cannot be read, has another mode, or other content.
        StoreError: the package cryptography is missing.
    """
    if path is None:
        return StoreKeys(RowNames())
    try:
        data = read_private(field, path)
    except SecurityError as error:
        raise StoreSettingError(error.field, error.expected, error.seen) from error
    names: list[bytes] = []
    keys: list[bytes] = []
    for number, line in enumerate(data.splitlines(), 1):
        text = line.partition(b"#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise StoreSettingError(field, f"{_EXPECTED} in {path}", f"another line {number}")
        (names if found[1] == b"names" else keys).append(bytes.fromhex(found[2].decode()))
    if len(names) != 1:
        raise StoreSettingError(field, f"one line names in {path}", f"{len(names)}")
    if not 1 <= len(keys) <= MOST_KEYS:
        raise StoreSettingError(field, f"1 to {MOST_KEYS} lines key in {path}", f"{len(keys)}")
    if len({*names, *keys}) < 1 + len(keys):
        raise StoreSettingError(field, f"other digits in every line of {path}", "some twice")
    return StoreKeys(RowNames(names[0]), RowKeys(keys, partial(os.urandom, SALT_NBYTES)))
