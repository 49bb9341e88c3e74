"""The table of a store's settings: names and defaults from the code, and what each means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from pdconn.store.settings import SAVE, SHELVES, WINDOW_EVERY, StoreSettings

_SIZE = "size: `20GiB`, `512 MiB`, bytes"
_FLAG = "true, false"

#: What a key takes, and what it means.
MEANINGS: Mapping[str, tuple[str, str]] = {
    "root": (
        "path",
        "Where rows are kept: a folder of this machine or of a shared file system, made if it is "
        "not there. Engines with the same root share rows.",
    ),
    "capacity": (
        _SIZE,
        "Bytes that the root may hold, rows and those being written; the least that an engine on "
        "the root names counts. See [The budget](#the-budget).",
    ),
    "shelf": ("", "Where rows are and what moves their bytes, see [Shelves](#shelves)."),
    "bucket": (
        "`bucket` or `bucket/prefix`",
        "With shelf `obj`, needed: the bucket of rows, see [Object stores](#object-stores).",
    ),
    "endpoint": ("URL", "With shelf `obj`: the server; without one AWS is used."),
    "region": (
        "region",
        "With shelf `obj`: the bucket's; without one what the machine's AWS configuration says.",
    ),
    "staging": (
        _SIZE,
        "Host memory of each rank for rows on their way to the KV cache, for all requests; one "
        "prefix is loaded as far as it fits. `pdconn plan --store` says what a prompt takes.",
    ),
    "block_tokens": (
        "power of two, multiple of 16",
        "Tokens of a row. At least the largest block of a KV cache group, and a multiple of all; "
        "of models with states the engine's block. Engines share rows only if it is the same.",
    ),
    "window_every": (
        "",
        "At which boundaries windows are kept, besides the last of a prompt and the place where "
        "prompts part: `auto` keeps them at or below the bytes of full attention, `all` at every "
        "boundary, `last` at no other, a number of tokens at every so many.",
    ),
    "wa_share": (
        "above 0, at most 1",
        "Share of the capacity that windows may take; beyond it their rows are evicted first.",
    ),
    "save": (
        "",
        "What is saved: `prompt` tokens, or `all`, the generated ones with them, for the next turn "
        "of a conversation.",
    ),
    "read_only": (_FLAG, "Load rows, and save none."),
    "min_tokens": (
        "number",
        "A hit that saves fewer tokens than this is computed instead, as is a prompt of fewer.",
    ),
    "direct_io": (
        "`auto`, true, false",
        "O_DIRECT for whole pages. `auto` reads past the page cache what is not in it.",
    ),
}

_CHOICES = {"shelf": SHELVES, "window_every": WINDOW_EVERY, "save": SAVE}
_MORE = {"window_every": ", tokens"}
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


def rows() -> Iterator[tuple[str, str, str, str]]:
    """A row for each key: its name, what it takes, its default, what it means.

    Raises:
        KeyError: a key of the settings that is not explained here.
    """
    for field in fields(StoreSettings):
        takes, meaning = MEANINGS[field.name]
        if field.name in _CHOICES:
            takes = ", ".join(f"`{word}`" for word in _CHOICES[field.name])
            takes += _MORE.get(field.name, "")
        default = "needed" if field.default is MISSING else _shown(field.name, field.default)
        yield f"`{field.name}`", takes, default, meaning


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name in ("capacity", "staging"):
        size, unit = next(one for one in _UNITS if value % one[0] == 0)
        return f"`{value // size}{unit}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
