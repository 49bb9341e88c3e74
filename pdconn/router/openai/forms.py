"""Checks the form bodies (``multipart/form-data``) of clients.  Pure.

A form is split at its boundary, and only the heads of parts are parsed: contents of files are not,
though they may look like a head.  The engine parses the form again with another parser, so a form
that two parsers could interpret differently is refused::

    --B                                                   a delimiter
    Content-Disposition: form-data; name="model"          a head, as clients write it
                                                          an empty line
    whisper                                               the value: any bytes without "--B"
    --B--                                                 the end, and nothing after it

Lines end with CR LF; ``--B`` occurs nowhere else, not even after a lone LF.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pdconn.router.openai.requests import NAMES_MEMORY
from pdconn.router.router_errors import BadBody
from transport.errors import shown

MAX_PARTS = 256
"""The limit of fields in a JSON body."""
MAX_HEAD_NBYTES = 8 << 10
"""Bytes of one part's head."""
_MOST_MODEL_NBYTES = 512

#: Without ``<``, which some parsers remove, and without quoted characters.  No further parameter:
#: under a charset such as punycode ``name="vllm_xargs-"`` decodes to ``vllm_xargs``.
_FORM = re.compile(
    r"\s*multipart/form-data\s*(?:;\s*charset=\"?utf-8\"?\s*)?;\s*boundary="
    r"(?:([\w.+/-]{1,200})|\"([\w'()+,./:=? -]{0,199}[\w'()+,./:=?-])\")"
    r"\s*(?:;\s*charset=\"?utf-8\"?\s*)?",
    re.IGNORECASE | re.ASCII,
)
#: As clients write it.  The engine could read another name from any other form (folded, quoted or
#: encoded differently).
_DISPOSITION = re.compile(
    rb'content-disposition: form-data; name="([A-Za-z0-9_.\[\]-]{1,64})"'
    rb'(?:; filename="[^"\\\r\n]*")?(?:; filename\*=[^;"\\\r\n]*)?',
    re.IGNORECASE,
)
_HEAD_LINE = re.compile(rb"(?!content-disposition:)[a-z0-9-]{1,64}:[^\r\n\0]*", re.IGNORECASE)
_NOT_IN_FORMS = frozenset({*NAMES_MEMORY, "vllm_xargs"})
_EXPECTED_HEAD = 'parts with Content-Disposition: form-data; name="a plain name"'
_EXPECTED_FORM = "parts between lines of the boundary, which stands nowhere else"


class _FormPart(NamedTuple):
    """The bounds of a part's head and value in the body."""

    head: slice
    value: slice


def check_form(content_type: str, raw: bytes) -> str | None:
    """Check that a form names no engine memory; returns the value of its part ``model``.

    Raises:
        BadBody: the body is not a form, a part's head is unusual, or a part is not allowed.
    """
    found = _FORM.fullmatch(content_type)
    if found is None:
        expected = "multipart/form-data with a boundary, in UTF-8"
        raise BadBody("Content-Type", expected, shown(content_type))
    model = None
    for part in _parts(raw, (found[1] or found[2]).encode()):
        name = _name(raw[part.head])
        if name in _NOT_IN_FORMS:
            raise BadBody(name, "no value (engines name blocks, clients may not)", "a part")
        if name == "model":  # of several the engine uses the last
            model = raw[part.value][:_MOST_MODEL_NBYTES].decode("utf-8", "replace")
    return model


def _parts(raw: bytes, boundary: bytes) -> Iterator[_FormPart]:
    """Every part; the first deviation from the format raises, after the parts before it."""
    line = b"--" + boundary
    if not raw.startswith(line):
        raise BadBody("body", "a form that begins with its boundary", _seen(raw[:80]))
    at = 0
    for _ in range(MAX_PARTS + 1):
        at += len(line)
        end = raw[at : at + 6]
        if end in (b"--", b"--\r\n"):
            return
        if not end.startswith(b"\r\n"):
            raise BadBody("body", _EXPECTED_FORM, _seen(line + raw[at : at + 40]))
        begin = at + 2
        blank = raw.find(b"\r\n\r\n", begin, begin + MAX_HEAD_NBYTES)
        if blank < 0:
            raise BadBody("body", _EXPECTED_HEAD, _seen(raw[begin : begin + 80]))
        value = blank + 4
        at = raw.find(line, begin)
        if at < value + 2 or raw[at - 2 : at] != b"\r\n":
            seen = "no last line" if at < 0 else _seen(raw[max(value, at - 20) : at + 80])
            raise BadBody("body", _EXPECTED_FORM, seen)
        yield _FormPart(slice(begin, blank), slice(value, at - 2))
    raise BadBody("body", f"at most {MAX_PARTS} parts", "more")


def _name(head: bytes) -> str:
    """The name in a part's head, which has exactly one ``Content-Disposition``."""
    names = []
    for line in head.split(b"\r\n"):
        found = _DISPOSITION.fullmatch(line)
        if found is not None:
            names.append(found[1].decode())
        elif _HEAD_LINE.fullmatch(line) is None:
            raise BadBody("body", _EXPECTED_HEAD, _seen(line[:80]))
    if len(names) != 1:
        raise BadBody("body", _EXPECTED_HEAD, f"{len(names)} of them in a part")
    return names[0]


def _seen(raw: bytes) -> str:
    return shown(raw.decode("latin-1"))
