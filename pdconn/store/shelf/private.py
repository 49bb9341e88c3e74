"""Whose folders a root consists of: who may write there chooses KV that engines believe.

Rows are checked against accidents and not against people: their checksums have no key.  So a root
is held to what the side channel asks of a secret's file.  What we make in it is for its owner
alone; the root itself may be listed by others, as mount points may.
"""

from __future__ import annotations

import os
import stat

from pdconn.store.errors import FormatError

_BELOW = ("rows", "parts", "budget")


def check_private(root: str) -> None:
    """See that nobody else can write to a root, or to a folder that we make in it.

    Root of the machine may use anybody's folder; others their own, and root's.

    Raises:
        FormatError: naming the folder, its mode or owner, and what to do.
        OSError: a folder cannot be looked at.
    """
    _check(root, os.stat(root))
    for name in _BELOW:
        path = os.path.join(root, name)
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(found.st_mode):  # anything else is not followed
            _check(path, found)


def _check(path: str, found: os.stat_result) -> None:
    user, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if user not in (0, found.st_uid) and found.st_uid != 0:
        expected = f"a folder of user {user} (chown, or a folder of its own below it)"
        raise FormatError(f"store.root: {path}", expected, f"one of user {found.st_uid}")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        expected = (
            "a folder that only its owner can write (chmod go-w, or a folder of its own below)"
        )
        raise FormatError(f"store.root: {path}", expected, f"mode {mode:04o}")
