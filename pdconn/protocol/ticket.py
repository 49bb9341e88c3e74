"""The ticket: what prefill sends to decode through the proxy.

It is the ``kv_transfer_params`` dict that vLLM's proxies pass through untouched,
with the keys of vLLM's in-tree connector and one of ours, ``pdconn``.  Clients and proxies
can change it, so nothing in it is trusted: block lists are checked against the geometry in
the Welcome, and the lender compares their digest with what it lent.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdconn.protocol.errors import TicketError
from pdconn.protocol.limits import DIGEST_NBYTES, MAX_GROUPS, MAX_TEXT

I64 = NDArray[np.int64]

TICKET_VERSION = 2
MAX_BLOCKS = 1 << 22
"""Of one ticket, all groups together, whatever its tokens."""
_BLOCKS_PER_TOKEN = 4
_SPARE_BLOCKS = 4096
MAX_BLOCK_ID = 2**31 - 1
_EXACT = float(1 << 53)
PORTS = (1, 65535)
_TOKENS = (0, 1 << 31)
MAX_CUTS = 64
_PROMPT_HEX = 32

TOKENS = msgspec.msgpack.Encoder(enc_hook=int)
"""Encodes tokens; those of a type that msgpack does not know, such as numpy's, as integers."""


@dataclass(frozen=True, slots=True)
class BlockList:
    """Blocks of one group by logical position.

    ``ids[i]`` holds logical block ``first + i``; id 0 is a hole (vLLM's null
    block) on either side.
    """

    first: int
    ids: tuple[int, ...]
    _array: I64 | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def array(self) -> I64:
        """``ids``, shape (len(ids),), int64; made once, and read-only."""
        if self._array is None:
            array = np.fromiter(self.ids, np.int64, len(self.ids))
            array.flags.writeable = False
            object.__setattr__(self, "_array", array)
        assert self._array is not None
        return self._array

    def __reduce__(self) -> tuple[type[BlockList], tuple[int, tuple[int, ...]]]:
        """Pickle without the array: a copy makes its own."""
        return BlockList, (self.first, self.ids)


@dataclass(frozen=True, slots=True)
class TicketCut:
    """A prefix of what is lent that a reader may use alone.

    Attributes:
        num_tokens: of the prefix.
        digest: of these tokens.
    """

    num_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """A promise of KV: its lender, its request id there, and its blocks.

    ``prompt`` is a digest of the prompt that the KV was computed from.  Prefill and decode build
    tickets with the same checks, so prefill makes none that decode refuses.  ``cuts``, in ascending
    order, are prefixes that a prompt may share instead of all of it.  ``adapter`` is a digest of
    the adapter's files; empty without one, and where adapters are compared by name alone.

    Raises:
        TicketError: a name that is too long or not printable, or a number out of bounds.
    """

    engine_id: str
    incarnation: str
    request_id: str
    host: str
    port: int
    num_tokens: int
    prompt: str
    blocks: tuple[BlockList, ...]
    cuts: tuple[TicketCut, ...] = ()
    adapter: str = ""

    def __post_init__(self) -> None:
        for field_name, text in (
            ("remote_engine_id", self.engine_id),
            ("pdconn.incarnation", self.incarnation),
            ("remote_request_id", self.request_id),
            ("remote_host", self.host),
            ("pdconn.prompt", self.prompt),
        ):
            if not 0 < len(text) <= MAX_TEXT or not text.isprintable():
                raise TicketError(field_name, f"1 to {MAX_TEXT} printable characters", text)
        if len(self.adapter) > MAX_TEXT or not self.adapter.isprintable():
            expected = f"at most {MAX_TEXT} printable characters"
            raise TicketError("pdconn.adapter", expected, self.adapter)
        _check_range("remote_port", self.port, *PORTS)
        _check_range("remote_num_tokens", self.num_tokens, *_TOKENS)
        check_block_count(sum(len(group.ids) for group in self.blocks))
        _check_cuts(self.cuts, self.num_tokens)

    def digest(self) -> bytes:
        """16 bytes that differ when anything that the lender promised differs (BLAKE2b).

        The lender keeps its own, and a claim must repeat it, since clients and proxies can
        change a ticket.
        """
        digest = hashlib.blake2b(block_digest(self.blocks), digest_size=DIGEST_NBYTES)
        promised = (self.incarnation, self.request_id, self.prompt, str(self.num_tokens))
        cuts = (text for cut in self.cuts for text in (str(cut.num_tokens), cut.digest))
        adapter = (self.adapter,) if self.adapter else ()
        for text in (*promised, *cuts, *adapter):
            digest.update(f"{len(text)}:{text}".encode())
        return digest.digest()

    def check_prompt(self, digest: str) -> None:
        """Check that the ticket is for the prompt with this digest, see :func:`prompt_digest`.

        Raises:
            TicketError: it is for another one.
        """
        if self.prompt != digest:
            raise TicketError("pdconn.prompt", digest, self.prompt)

    def to_params(self, tp_size: int, pp_size: int) -> dict[str, Any]:
        """The ``kv_transfer_params`` for the decode engine's request."""
        cuts = [[cut.num_tokens, cut.digest] for cut in self.cuts]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": [list(group.ids) for group in self.blocks],
            "remote_num_tokens": self.num_tokens,
            "tp_size": tp_size,
            "pp_size": pp_size,
            "pdconn": {
                "version": TICKET_VERSION,
                "incarnation": self.incarnation,
                "prompt": self.prompt,
                "first_blocks": [group.first for group in self.blocks],
                **({"cuts": cuts} if cuts else {}),
                **({"adapter": self.adapter} if self.adapter else {}),
            },
        }


def prompt_digest(tokens: Sequence[int], adapter: str = "", features: Iterable[str] = ()) -> str:
    """16 hexadecimal bytes, equal when the KV of two prompts may be exchanged.

    Args:
        tokens: of the prompt.
        adapter: the name of the adapter that computes it; empty without one.
        features: identifies each multimodal input, in their order.

    About 10 ns a token, on an engine's thread: msgpack encodes tokens three times as fast as an
    array is made of them, and SHA-256 has instructions of its own on today's processors.

    >>> prompt_digest([1, 2, 3]) == prompt_digest([1, 2, 3], "french")
    False
    """
    return closed_digest(hashlib.sha256(TOKENS.encode(tokens)), adapter, features)


def closed_digest(digest: Any, adapter: str, features: Iterable[str], more: str = "") -> str:
    """The digest of the tokens in ``digest``, and of everything else that their KV depends on."""
    digest.update(f"|{adapter}".encode())
    for feature in features:
        digest.update(f"|{feature}".encode())
    digest.update(more.encode())
    return str(digest.hexdigest()[:_PROMPT_HEX])


def trimmed(ids: Sequence[int]) -> BlockList:
    """A group's block list without its leading holes.

    >>> trimmed([0, 0, 7, 9])
    BlockList(first=2, ids=(7, 9))
    """
    first = next((index for index, block in enumerate(ids) if block), len(ids))
    return BlockList(first, tuple(ids[first:]))


def block_digest(blocks: Sequence[BlockList]) -> bytes:
    """16 bytes that differ when any group's blocks do (BLAKE2b)."""
    digest = hashlib.blake2b(digest_size=DIGEST_NBYTES)
    for group in blocks:
        digest.update(struct.pack(f"<qq{len(group.ids)}q", group.first, len(group.ids), *group.ids))
    return digest.digest()


def check_blocks(blocks: Sequence[BlockList], num_blocks: Sequence[int]) -> None:
    """Check that block lists fit a cache with ``num_blocks`` blocks per group.

    Raises:
        TicketError: another number of groups, or an id beyond its group's cache.
    """
    if len(blocks) != len(num_blocks):
        expected = f"{len(num_blocks)} lists, one per KV cache group of prefill"
        raise TicketError("remote_block_ids", expected, len(blocks))
    for group, (listed, count) in enumerate(zip(blocks, num_blocks, strict=True)):
        highest = max(listed.ids, default=0)
        if highest and highest >= count:
            field = f"remote_block_ids[{group}][{listed.ids.index(highest)}]"
            raise TicketError(field, f"0 to {count - 1}", highest)


def max_blocks_for(num_tokens: int) -> int:
    """Blocks that a ticket for a prompt of ``num_tokens`` tokens may list, all groups together.

    Engines list a block per 16 tokens or more and group, of windows only the last blocks.  That
    leaves room for 64 groups, or for blocks of a single token, and for short prompts.
    """
    return min(MAX_BLOCKS, _BLOCKS_PER_TOKEN * num_tokens + _SPARE_BLOCKS)


def check_block_count(count: int, most: int = MAX_BLOCKS) -> None:
    """Check how many blocks a ticket lists.

    Raises:
        TicketError: more than ``most``.
    """
    if count > most:
        raise TicketError("remote_block_ids", f"at most {most} blocks", count)


def parse_ticket(params: object, max_blocks: int = MAX_BLOCKS) -> Ticket:
    """Read ``kv_transfer_params``; unknown keys are ignored.

    Args:
        params: of any type, since clients write it.
        max_blocks: of all groups together; a ticket that lists more is refused before its
            blocks are looked at, see :func:`max_blocks_for`.

    Raises:
        TicketError: naming the field, the expected and the seen value.
    """
    if not isinstance(params, dict):
        raise TicketError("kv_transfer_params", "an object", params)
    ours = _field(
        params, "pdconn", dict, "a ticket made by pdconn (does prefill run PdconnConnector?)"
    )
    check_ticket_version(ours)
    firsts = _field(ours, "pdconn.first_blocks", list, "a list of block positions")
    lists = _field(params, "remote_block_ids", list, "a list of block ids per group")
    if len(lists) > MAX_GROUPS:
        raise TicketError("remote_block_ids", f"at most {MAX_GROUPS} groups", len(lists))
    check_block_count(sum(len(ids) for ids in lists if isinstance(ids, list)), max_blocks)
    if len(firsts) != len(lists):
        raise TicketError("pdconn.first_blocks", f"{len(lists)} entries", len(firsts))
    return Ticket(
        engine_id=text_in(params, "remote_engine_id"),
        incarnation=text_in(ours, "pdconn.incarnation"),
        request_id=text_in(params, "remote_request_id"),
        host=text_in(params, "remote_host"),
        port=number_in(params, "remote_port", *PORTS),
        num_tokens=number_in(params, "remote_num_tokens", *_TOKENS),
        prompt=text_in(ours, "pdconn.prompt"),
        blocks=tuple(
            _block_list(index, first, ids)
            for index, (first, ids) in enumerate(zip(firsts, lists, strict=True))
        ),
        cuts=_parse_cuts(ours.get("cuts", [])),
        adapter=text_in(ours, "pdconn.adapter") if "adapter" in ours else "",
    )


def _parse_cuts(given: object) -> tuple[TicketCut, ...]:
    if not isinstance(given, list) or len(given) > MAX_CUTS:
        raise TicketError("pdconn.cuts", f"a list of at most {MAX_CUTS}", given)
    return tuple(_cut(index, one) for index, one in enumerate(given))


def _cut(index: int, given: object) -> TicketCut:
    if isinstance(given, list) and len(given) == 2:
        num_tokens, digest = whole(given[0]), given[1]
        if num_tokens is not None and type(digest) is str:
            return TicketCut(num_tokens, digest)
    raise TicketError(f"pdconn.cuts[{index}]", "tokens and the digest of them", given)


def _check_cuts(cuts: Sequence[TicketCut], num_tokens: int) -> None:
    before = 0
    for index, cut in enumerate(cuts):
        where = f"pdconn.cuts[{index}]"
        _check_range(where, cut.num_tokens, before + 1, num_tokens - 1)
        if not 0 < len(cut.digest) <= MAX_TEXT or not cut.digest.isprintable():
            raise TicketError(where, f"1 to {MAX_TEXT} printable characters", cut.digest)
        before = cut.num_tokens


def _block_list(index: int, first: object, ids: object) -> BlockList:
    where = f"remote_block_ids[{index}]"
    position_of_first = whole(first)
    if position_of_first is None or not 0 <= position_of_first <= MAX_BLOCKS:
        raise TicketError(f"pdconn.first_blocks[{index}]", f"0 to {MAX_BLOCKS}", first)
    if not isinstance(ids, list):
        raise TicketError(where, "a list of block ids", ids)
    # Three passes in C take a quarter of the time of one in Python.
    kinds = set(map(type, ids))
    if float in kinds:
        ids = [block if (integer := whole(block)) is None else integer for block in ids]
        kinds = set(map(type, ids))
    if ids and (kinds != {int} or min(ids) < 0 or max(ids) > MAX_BLOCK_ID):
        position, wrong = next(
            (position, block)
            for position, block in enumerate(ids)
            if type(block) is not int or not 0 <= block <= MAX_BLOCK_ID
        )
        raise TicketError(f"{where}[{position}]", f"0 to {MAX_BLOCK_ID}", wrong)
    return BlockList(position_of_first, tuple(ids))


def whole(number: object) -> int | None:
    """A whole number as JSON may carry it, or None if it is not one.

    A protobuf ``Struct`` and some languages have no integers, so a router that keeps the ticket in
    one of those sends 5600.0 for 5600.  Every number of a ticket is below 2**53, up to which
    doubles represent all integers.

    >>> whole(7.0), whole(7.5), whole(True), whole(1e300)
    (7, None, None, None)
    """
    if type(number) is int:
        return number
    if type(number) is float and abs(number) < _EXACT and number.is_integer():
        return int(number)
    return None


def _field(params: Mapping[str, Any], field: str, kind: type, expected: str) -> Any:
    key = field.rpartition(".")[2]
    if key not in params:
        raise TicketError(field, expected, "nothing")
    if type(params[key]) is not kind:
        raise TicketError(field, expected, params[key])
    return params[key]


def ours_in(params: object) -> dict[Any, Any]:
    """Our part of what a client wrote, ``pdconn``; empty if there is none."""
    ours = params.get("pdconn") if isinstance(params, dict) else None
    return ours if isinstance(ours, dict) else {}


def check_ticket_version(ours: Mapping[Any, Any]) -> None:
    """Check the version in our part of a ticket.

    Raises:
        TicketError: it is another one.
    """
    version = number_in(ours, "pdconn.version", 1, 1 << 16)
    if version != TICKET_VERSION:
        raise TicketError("pdconn.version", TICKET_VERSION, version)


def text_in(params: Mapping[Any, Any], field: str) -> str:
    """A text of a ticket, under the last part of ``field``.

    Raises:
        TicketError: it is missing, or no text.
    """
    text: str = _field(params, field, str, "text")
    return text


def number_in(params: Mapping[Any, Any], field: str, low: int, high: int) -> int:
    """A whole number of a ticket, under the last part of ``field``.

    Raises:
        TicketError: it is missing, no whole number, or out of bounds.
    """
    expected = f"a whole number from {low} to {high}"
    key = field.rpartition(".")[2]
    number = whole(params.get(key))
    if number is None:
        raise TicketError(field, expected, params.get(key, "nothing"))
    _check_range(field, number, low, high)
    return number


def _check_range(field: str, number: int, low: int, high: int) -> None:
    if not low <= number <= high:
        raise TicketError(field, f"{low} to {high}", number)
