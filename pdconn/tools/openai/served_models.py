"""The models that a server lists at ``/v1/models``.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model or an adapter; the length is None if the server does not report it."""

    name: str
    max_model_len: int | None = None
    is_adapter: bool = False


class _Listed(msgspec.Struct):
    id: str
    parent: object = None
    max_model_len: object = None


class _Listing(msgspec.Struct):
    data: list[msgspec.Raw] = []


def listed_models(page: bytes) -> tuple[ServedModel, ...]:
    """All listed models, in the server's order; entries without a name are skipped.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: the page is no list of models.

    >>> listed_models(b'{"data": [{"id": "m", "max_model_len": 4096}, {"id": 7}]}')
    (ServedModel(name='m', max_model_len=4096, is_adapter=False),)
    """
    found = []
    for entry in msgspec.json.decode(page, type=_Listing).data:
        try:
            one = msgspec.json.decode(entry, type=_Listed)
        except msgspec.DecodeError:
            continue
        length = one.max_model_len if type(one.max_model_len) is int else None
        found.append(ServedModel(one.id, length, bool(one.parent)))
    return tuple(found)
