"""The fleet as a TOML file, parsed strictly.

::

    [[engine]]
    url = "http://10.0.0.1:8000"
    roles = ["prefill"]
    events = "tcp://{host}:5557"    # optional, like the following
    replay = "tcp://{host}:5657"
    ranks = 2
    draining = true

One invalid entry invalidates the whole file: half a fleet is worse than the previous one.  A file
without engines is invalid too: editors leave an empty file for a moment while they write.
"""

from __future__ import annotations

import os
import tomllib
from typing import Any

from pdconn.router.fleet.member import BadMember, Member, Role, engine_name
from pdconn.router.router_errors import BadSetting
from transport.errors import did_you_mean

_TABLE = "engine"
_KINDS: dict[str, tuple[type, str]] = {
    "url": (str, "a string"),
    "roles": (list, "a list of roles"),
    "events": (str, "a string"),
    "replay": (str, "a string"),
    "ranks": (int, "a whole number"),
    "draining": (bool, "true or false"),
}
_ROLES = {role.value: role for role in Role}


def read_fleet(path: str | os.PathLike[str]) -> tuple[Member, ...]:
    """The engines of a file, in file order.

    Raises:
        BadSetting: the first mistake, as ``FILE: engine NUMBER: FIELD``.
    """
    where = os.fspath(path)
    tables = _tables(where, _load(where))
    first: dict[str, int] = {}
    members = []
    for number, table in enumerate(tables, start=1):
        member = _member(f"{where}: {_TABLE} {number}", table)
        if member.url in first:
            field = f"{where}: {_TABLE} {number}: url"
            raise BadSetting(field, f"a URL other than {_TABLE} {first[member.url]}'s", member.url)
        first[member.url] = number
        members.append(member)
    return tuple(members)


def _load(where: str) -> dict[str, Any]:
    try:
        with open(where, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise BadSetting(where, "a file to read", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deeply
        raise BadSetting(where, "TOML", str(error)) from error


def _tables(where: str, page: dict[str, Any]) -> list[Any]:
    for key in page:
        if key != _TABLE:
            raise BadSetting(where, f"nothing but [[{_TABLE}]] tables", key)
    tables = page.get(_TABLE, [])
    if not isinstance(tables, list):
        raise BadSetting(where, f"[[{_TABLE}]], in double brackets", f"[{_TABLE}]")
    if not tables:
        raise BadSetting(where, f"at least one [[{_TABLE}]]", "none")
    return tables


def _member(where: str, table: object) -> Member:
    if not isinstance(table, dict):
        raise BadSetting(where, "a table", table)
    for key, value in table.items():
        if key not in _KINDS:
            raise BadSetting(f"{where}: {key}", "a known key", key, did_you_mean(key, _KINDS))
        kind, expected = _KINDS[key]
        if type(value) is not kind:  # isinstance would accept true as a number
            raise BadSetting(f"{where}: {key}", expected, value)
    for key in ("url", "roles"):
        if key not in table:
            raise BadSetting(f"{where}: {key}", _KINDS[key][1], "nothing")
    url = engine_name(f"{where}: url", table["url"])
    roles = _roles(f"{where}: roles", table["roles"])
    try:
        return Member(**{**table, "url": url, "roles": roles})
    except BadMember as error:
        raise error.prefixed(f"{where}: ") from error


def _roles(field: str, names: list[Any]) -> frozenset[Role]:
    for name in names:
        if not isinstance(name, str) or name not in _ROLES:
            raise BadSetting(field, f"any of {', '.join(_ROLES)}", name)
        if names.count(name) > 1:
            raise BadSetting(field, "each role once", name)
    return frozenset(_ROLES[name] for name in names)
