"""The table of a store's settings: names and defaults from the code, and what each means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from pdconn.store.settings import BESIDE, COMPRESSION, SAVE, SHELVES, WINDOW_EVERY, StoreSettings

_SIZE = "size: `20GiB`, `512 MiB`, bytes"
_FLAG = "true, false"

#: What a key takes, and what it means.
MEANINGS: Mapping[str, tuple[str, str]] = {
    "root": (
        "path",
        "Where rows are kept: a folder on this machine or on a shared file system, created if it "
        "is missing. Engines with the same root share rows.",
    ),
    "capacity": (
        _SIZE,
        "Bytes that the root may hold, counting rows that are being written. If engines on the "
        "root give different values, the smallest counts. See [The budget](#the-budget).",
    ),
    "shelf": ("", "Where rows are and what moves their bytes; see [Shelves](#shelves)."),
    "bucket": (
        "`bucket` or `bucket/prefix`",
        "Required with shelf `obj`: the bucket of the rows; see [Object stores](#object-stores).",
    ),
    "endpoint": ("URL", "With shelf `obj`: the server. The default is AWS."),
    "region": (
        "region",
        "With shelf `obj`: the bucket's region. The default is that of the machine's AWS settings.",
    ),
    "staging": (
        _SIZE,
        "Host memory of each rank for rows on their way to the KV cache, shared by all requests. A "
        "prefix is loaded as far as it fits. `pdconn plan --store` says how much a prompt needs.",
    ),
    "block_tokens": (
        "power of two, multiple of 16",
        "Tokens of a row: a multiple of the block of every KV cache group; for models with states "
        "the engine's block. Engines share rows only if this value is the same.",
    ),
    "window_every": (
        "",
        "At which boundaries windows are kept, besides the end of a prompt and the place where "
        "two prompts diverge: `auto` keeps as many as take no more bytes than full attention, "
        "`all` keeps every boundary, `last` no further one, a number one every so many tokens.",
    ),
    "wa_share": (
        "above 0, at most 1",
        "Share of the capacity that windows may take; above it their rows are evicted first.",
    ),
    "save": (
        "",
        "What is saved: the tokens of the `prompt`, or `all`, which adds the generated ones for "
        "the next turn of a conversation.",
    ),
    "read_only": (_FLAG, "Load rows but save none."),
    "min_tokens": (
        "number",
        "A hit that saves fewer tokens than this is computed instead, and so is a shorter prompt.",
    ),
    "direct_io": (
        "`auto`, true, false",
        "O_DIRECT for whole pages. `auto` uses it for what is not in the page cache.",
    ),
    "beside": (
        "",
        "Whether full attention that is stored is loaded while the rest of a prompt is pulled: as "
        "far as that takes no longer than pulling all (`auto`), `always`, or `never`. See [Beside "
        "a pull](#beside-a-pull).",
    ),
    "compression": (
        "",
        "`exponents` saves rows a quarter smaller, without loss, where KV is bfloat16; see "
        "[Compression](#compression). Engines with `none` do not load such rows, nor the other "
        "way round.",
    ),
    "key_file": (
        "path",
        "Keys that rows are encrypted with; see [Encryption](#encryption). The same in every "
        "engine that shares rows.",
    ),
    "tenant_quota": (
        _SIZE,
        "Bytes of each tenant's rows that rows of other tenants do not evict; see "
        "[Tenants](#tenants). The same in every engine on the root.",
    ),
    "keep": (
        "true, false, shares and seconds",
        "Keep the rows of sessions whose requests ask for it; see [Sessions](#sessions). "
        '`{"share": 0.5, "tenant_share": 0.5, "seconds": 3600}`: the parts of the capacity that '
        "all promises and those of one tenant may keep, and the longest promise.",
    ),
}

_CHOICES = {
    "shelf": SHELVES,
    "window_every": WINDOW_EVERY,
    "save": SAVE,
    "beside": BESIDE,
    "compression": COMPRESSION,
}
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
        is_needed = field.default is MISSING and field.default_factory is MISSING
        default = "needed" if is_needed else _shown(field.name, field.default)
        yield f"`{field.name}`", takes, default, meaning


def _shown(name: str, value: Any) -> str:
    if name == "keep":
        return "`true`"
    if value is None:
        return "none"
    if name in ("capacity", "staging"):
        size, unit = next(one for one in _UNITS if value % one[0] == 0)
        return f"`{value // size}{unit}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
