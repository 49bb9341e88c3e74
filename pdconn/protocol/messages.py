"""The messages of the side channel, and the frames that they travel in.

Decode sends the first message of a connection, prefill answers::

    decode                          prefill
    Hello ────────────────────────►
          ◄──────────────── Welcome | Rejected
    Claim ────────────────────────►
          ◄──────────────── Granted | Refused
    Follow ───────────────────────►               instead, if decode has no ticket yet
          ◄──────────────── Parked, then Granted and Opened | Refused
          ◄──────────────── Grown, as often as blocks were written
          ◄──────────────── Completed | Refused
    Renew ────────────────────────►
          ◄──────────────── Granted | Refused
    ChecksumRequest ──────────────►              with verify
          ◄──────────────── Checksum | ChecksumUnavailable
    Confirm ──────────────────────►              everything is read
          ◄──────────────── Confirmed | Refused
    Done  ────────────────────────►              instead, if nothing (more) will be read

An operator's tool may send ``Describe`` instead, and receives ``Described``.

A *stream* names a request whose KV is being computed.  Its reader is granted a claim on a lease
that grows: it may read what was announced, and confirm it once the lease is complete.

A frame holds a list of messages, so everything due in one tick shares a frame.
Time-to-live travels, points in time never do: decode counts from *sending* the
claim or renewal that a ``Granted`` answers (named by ``seq``), prefill from
*receiving* it, so decode gives up first and no clock is shared.  What was read is valid only
once the lender has confirmed it: clocks drift and freeze, and the lender alone knows whether
it gave the blocks back before the last byte was read.

A frame is a four-byte big-endian length and that many bytes: a CRC-32 of the body,
big-endian, and the body.  The limit is checked on the length alone, before anything is kept
for the body.  The CRC detects accidents where nothing authenticates the other side: TCP's
own checksum misses some, and a Welcome with one wrong bit would move wrong bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from zlib import crc32

import msgspec

from pdconn.protocol.compat import traits_digest
from pdconn.protocol.errors import FrameError, MessageError
from pdconn.protocol.limits import (
    DIGEST_NBYTES,
    MAX_GROUPS,
    MAX_LAYER_CHUNKS,
    MAX_MESSAGES,
    MAX_RANKS,
    MAX_TEXT,
    MAX_TRAITS,
)
from pdconn.protocol.proof import ChecksumQuery, PieceSum
from pdconn.protocol.ticket import MAX_BLOCK_ID, MAX_BLOCKS
from registration.references import KVCacheReferences

PROTOCOL_VERSION = 6
"""Incremented whenever an engine of the version before could misread a message."""


class RefusalReason(StrEnum):
    """Why a claim, renewal or confirmation was refused."""

    UNKNOWN = "unknown"
    EXPIRED = "expired"
    CONSUMED = "consumed"
    ABORTED = "aborted"
    ALTERED = "altered"
    BAD_READER = "bad_reader"
    TOO_MANY = "too_many"


class RankGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker of an engine: its place, how to reach it, and its KV memory."""

    pp_rank: int
    tp_rank: int
    address: bytes
    references: KVCacheReferences


class Reader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's share of one pull.

    ``pull`` is unique per decode engine boot and request; ``rank`` of ``of`` ranks
    read for it, and the lent blocks are consumed when all of them are done.
    """

    pull: str
    rank: int
    of: int


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """First message of a connection: the reader's engine, and the incarnation of its ticket.

    ``wants`` is None to warm a connection up without a ticket: any incarnation fits.
    """

    version: int
    engine_id: str
    wants: str | None = None


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The lender's answer: all its ranks, and how to interpret its bytes.

    ``traits`` name everything about the content of a block that geometry does not (dtype, packing,
    model, weights); they must agree on both sides.  ``digest`` is the digest of the traits
    (:func:`pdconn.protocol.compat.traits_digest`).
    """

    version: int
    engine_id: str
    incarnation: str
    traits: dict[str, str]
    digest: str
    ranks: tuple[RankGeometry, ...]

    @classmethod
    def in_our_version(
        cls,
        engine_id: str,
        incarnation: str,
        traits: dict[str, str],
        ranks: tuple[RankGeometry, ...],
    ) -> Welcome:
        """A Welcome of our protocol version, with the digest of ``traits``."""
        digest = traits_digest(traits)
        return cls(PROTOCOL_VERSION, engine_id, incarnation, traits, digest, ranks)


class Describe(msgspec.Struct, frozen=True, tag="describe", forbid_unknown_fields=True):
    """Asks for this engine's KV geometry; the only message of its connection."""

    version: int


class Described(msgspec.Struct, frozen=True, tag="described", forbid_unknown_fields=True):
    """An engine's KV geometry for comparison: a ``Welcome`` with which nothing can be read.

    It has no transport addresses, and no base addresses of allocations.
    """

    version: int
    engine_id: str
    incarnation: str
    traits: dict[str, str]
    ranks: tuple[RankGeometry, ...]

    @classmethod
    def from_welcome(cls, welcome: Welcome) -> Described:
        """The part of ``welcome`` that any client may see."""
        ranks = tuple(
            RankGeometry(rank.pp_rank, rank.tp_rank, b"", rank.references.without_addresses())
            for rank in welcome.ranks
        )
        return cls(welcome.version, welcome.engine_id, welcome.incarnation, welcome.traits, ranks)


class Rejected(msgspec.Struct, frozen=True, tag="rejected", forbid_unknown_fields=True):
    """The lender's last message on a connection that it refuses to serve."""

    field: str
    expected: str
    seen: str


class Claim(msgspec.Struct, frozen=True, tag="claim", forbid_unknown_fields=True):
    """Asks to read what ``request`` lends; ``ticket`` is the ticket's digest."""

    seq: int
    request: str
    reader: Reader
    ticket: bytes


class Follow(msgspec.Struct, frozen=True, tag="follow", forbid_unknown_fields=True):
    """Asks to read what the request with this stream lends, while it is computed."""

    seq: int
    stream: str
    reader: Reader


class Renew(msgspec.Struct, frozen=True, tag="renew", forbid_unknown_fields=True):
    """Asks for more time for a claim that was granted."""

    seq: int
    request: str
    reader: Reader


class Confirm(msgspec.Struct, frozen=True, tag="confirm", forbid_unknown_fields=True):
    """Asks, after the last read has settled, whether the claim held until now.

    A claim that is confirmed is done.  ``ticket`` is the ticket's digest, as in the claim.
    """

    seq: int
    request: str
    reader: Reader
    ticket: bytes


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """This reader reads no more; it may have read nothing.

    ``ticket`` is the ticket's digest, as in the claim.
    """

    request: str
    reader: Reader
    ticket: bytes


class Granted(msgspec.Struct, frozen=True, tag="granted", forbid_unknown_fields=True):
    """The lent blocks stay as they are for ``ttl_ms`` milliseconds."""

    seq: int
    request: str
    pull: str
    ttl_ms: int


class Parked(msgspec.Struct, frozen=True, tag="parked", forbid_unknown_fields=True):
    """The stream of ``Follow`` ``seq`` is not known yet; it is awaited for ``ttl_ms`` ms.

    Until it is opened, a ``Done`` names it as its request.
    """

    seq: int
    stream: str
    pull: str
    ttl_ms: int


class Opened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """The request of a stream is known: its ticket, without blocks.  The claim is granted as well.

    ``prompt`` is the digest of its prompt, and ``adapter`` that of its adapter's files.
    """

    stream: str
    pull: str
    request: str
    num_tokens: int
    prompt: str
    adapter: str


class GrownBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of group ``group`` that are written: logical block ``first`` and those behind it."""

    group: int
    first: int
    ids: tuple[int, ...]


class Grown(msgspec.Struct, frozen=True, tag="grown", forbid_unknown_fields=True):
    """More blocks of a stream are written.  A position is announced once, and never changes."""

    request: str
    pull: str
    blocks: tuple[GrownBlocks, ...]


class Completed(msgspec.Struct, frozen=True, tag="completed", forbid_unknown_fields=True):
    """All blocks of a stream are written: first logical block and ids of each group.

    They are the ticket's, whose digest a ``Confirm`` must repeat.
    """

    request: str
    pull: str
    blocks: tuple[tuple[int, tuple[int, ...]], ...]


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed", forbid_unknown_fields=True):
    """The blocks were lent until ``Confirm`` ``seq`` arrived: what was read is valid."""

    seq: int
    request: str
    pull: str


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """The claim, renewal or confirmation ``seq`` is refused; nothing read under it is valid."""

    seq: int
    request: str
    pull: str
    why: RefusalReason
    detail: str


class ChecksumRequest(
    msgspec.Struct, frozen=True, tag="checksum_request", forbid_unknown_fields=True
):
    """Asks for the checksum of what a claim holder has read; the answer repeats ``number``."""

    number: int
    request: str
    reader: Reader
    ask: ChecksumQuery


class Checksum(msgspec.Struct, frozen=True, tag="checksum", forbid_unknown_fields=True):
    """The checksum of what was lent, computed when it was lent."""

    number: int
    pull: str
    answer: PieceSum


class ChecksumUnavailable(
    msgspec.Struct, frozen=True, tag="checksum_unavailable", forbid_unknown_fields=True
):
    """The lender does not have this checksum."""

    number: int
    pull: str
    detail: str


FromReader = Hello | Describe | Claim | Follow | Renew | ChecksumRequest | Confirm | Done
StreamReply = Parked | Opened | Grown | Completed
"""A lender's replies to one pull of a stream."""
PullReply = Granted | Confirmed | Refused | Checksum | ChecksumUnavailable | StreamReply
"""A lender's replies to one pull."""

ToReader = Welcome | Rejected | PullReply
ToTool = Described | Rejected
FromLender = ToReader | ToTool

_WITH_TICKET = (Claim, Confirm, Done)
_encoder = msgspec.msgpack.Encoder()
_from_reader = msgspec.msgpack.Decoder(list[FromReader])
_to_reader = msgspec.msgpack.Decoder(list[ToReader])
_to_tool = msgspec.msgpack.Decoder(list[ToTool])


def encode_frames(
    messages: Sequence[FromReader] | Sequence[FromLender], max_nbytes: int = 1 << 19
) -> list[bytes]:
    """Bodies of frames of at most ``max_nbytes``, unless a single message is longer."""
    if not messages:
        return []
    body = encode(messages)
    if len(messages) == 1 or (len(body) <= max_nbytes and len(messages) <= MAX_MESSAGES):
        return [body]
    half = len(messages) // 2
    return [
        *encode_frames(messages[:half], max_nbytes),
        *encode_frames(messages[half:], max_nbytes),
    ]


def encode(messages: Sequence[FromReader] | Sequence[FromLender]) -> bytes:
    """The body of one frame."""
    return _encoder.encode(messages)


def decode_from_reader(body: bytes) -> list[FromReader]:
    """The messages of a decode engine.

    Raises:
        MessageError: not a list of known messages, or a value out of bounds.
    """
    messages: list[FromReader] = _decoded(_from_reader, body)
    for message in messages:
        if isinstance(message, Hello):
            if message.wants is not None:
                _bounded("hello.wants", message.wants)
            _bounded("hello.engine_id", message.engine_id)
        elif not isinstance(message, Describe):
            _check_reader(message.reader)
            name = message.stream if isinstance(message, Follow) else message.request
            _bounded("request", name)
            if isinstance(message, _WITH_TICKET) and len(message.ticket) != DIGEST_NBYTES:
                raise MessageError("ticket", f"a digest of {DIGEST_NBYTES} bytes", message.ticket)
    return messages


def decode_from_lender(body: bytes, to_tool: bool = False) -> list[FromLender]:
    """The messages of a prefill engine to a decode engine, or to an operator's tool.

    Messages for the respective other are refused by their tag, before the rest is decoded.

    Raises:
        MessageError: not a list of known messages, or a value out of bounds.
    """
    messages: list[FromLender] = _decoded(_to_tool if to_tool else _to_reader, body)
    for message in messages:
        if isinstance(message, Welcome | Described):
            check_geometry(message)
        elif isinstance(message, Rejected):
            for text in (message.field, message.expected, message.seen):
                _short("rejected", text)
        elif isinstance(message, Refused | ChecksumUnavailable):
            _short("detail", message.detail)
        elif isinstance(message, StreamReply):
            _check_stream_reply(message)
        if isinstance(message, Granted | Parked) and not 0 < message.ttl_ms < 2**31:
            raise MessageError("ttl_ms", "1 to 2^31 - 1", message.ttl_ms)
    return messages


def check_geometry(message: Welcome | Described) -> None:
    """Check the bounds of an engine's description of itself.

    Raises:
        MessageError: no name, no rank, or more of something than any engine has.
    """
    _bounded("engine_id", message.engine_id)
    _bounded("incarnation", message.incarnation)
    if not 0 < len(message.ranks) <= MAX_RANKS:
        raise MessageError("ranks", f"1 to {MAX_RANKS}", len(message.ranks))
    if len(message.traits) > MAX_TRAITS:
        raise MessageError("traits", f"at most {MAX_TRAITS}", len(message.traits))
    for name, value in message.traits.items():
        _short("traits", name)
        _short(f"traits.{name}", value)
    for rank in message.ranks:
        groups, tensors = rank.references.groups, rank.references.tensors
        if len(tensors) > MAX_LAYER_CHUNKS:
            raise MessageError("tensors of a rank", f"at most {MAX_LAYER_CHUNKS}", len(tensors))
        if len(groups) > MAX_GROUPS:
            raise MessageError("groups", f"at most {MAX_GROUPS}", len(groups))
        chunks = sum(len(group.data) for group in groups)
        if chunks > MAX_LAYER_CHUNKS:
            raise MessageError("layers of a rank", f"at most {MAX_LAYER_CHUNKS}", chunks)
        for group in groups:
            for ref in group.data:
                _short("layer", ref.layer)


def _check_stream_reply(message: StreamReply) -> None:
    """Check the bounds of what a lender sends of a stream."""
    lists: list[tuple[int, tuple[int, ...]]] = []
    if isinstance(message, Opened):
        for field in ("request", "prompt"):
            _bounded(f"opened.{field}", getattr(message, field))
        _short("opened.adapter", message.adapter)
    elif isinstance(message, Grown):
        lists = [(each.first, each.ids) for each in message.blocks]
        if any(not 0 <= each.group < MAX_GROUPS for each in message.blocks):
            groups = [each.group for each in message.blocks]
            raise MessageError("grown.group", f"below {MAX_GROUPS}", groups)
    elif isinstance(message, Completed):
        lists = list(message.blocks)
    if len(lists) > MAX_GROUPS:
        raise MessageError("groups of a stream", f"at most {MAX_GROUPS}", len(lists))
    for first, ids in lists:
        if not 0 <= first <= MAX_BLOCKS or len(ids) > MAX_BLOCKS:
            raise MessageError("blocks of a stream", f"at most {MAX_BLOCKS}", max(first, len(ids)))
        if ids and not 0 <= min(ids) <= max(ids) <= MAX_BLOCK_ID:
            raise MessageError("block id of a stream", f"0 to {MAX_BLOCK_ID}", (min(ids), max(ids)))


def _decoded(decoder: msgspec.msgpack.Decoder, body: bytes) -> list:  # type: ignore[type-arg]
    try:
        messages = decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MessageError("message", "a list of known messages", str(error)) from error
    if len(messages) > MAX_MESSAGES:
        raise MessageError("messages in one frame", f"at most {MAX_MESSAGES}", len(messages))
    return messages  # type: ignore[no-any-return]


def _bounded(field: str, text: str) -> None:
    if not 0 < len(text) <= MAX_TEXT or not text.isprintable():
        raise MessageError(field, f"1 to {MAX_TEXT} printable characters", text)


def _short(field: str, text: str) -> None:
    if len(text) > MAX_TEXT or not text.isprintable():
        raise MessageError(field, f"at most {MAX_TEXT} printable characters", text)


def _check_reader(reader: Reader) -> None:
    _bounded("reader.pull", reader.pull)
    if not 0 < reader.of <= MAX_RANKS:
        raise MessageError("reader.of", f"1 to {MAX_RANKS}", reader.of)
    if not 0 <= reader.rank < reader.of:
        raise MessageError("reader.rank", f"0 to {reader.of - 1}", reader.rank)


_PREFIX = 4
_CRC = 4


def frame(body: bytes) -> bytes:
    """``body`` with its length and CRC before it.

    Raises:
        FrameError: the length does not fit into four bytes.
    """
    length = _CRC + len(body)
    if length >= 2**32:
        raise FrameError("frame length", "under 2^32", length)
    return length.to_bytes(_PREFIX, "big") + crc32(body).to_bytes(_CRC, "big") + body


class Frames:
    """Splits a byte stream into frames with bodies of at most ``max_nbytes``.

    ``max_later`` limits all bodies but the first, where that differs.

    Attributes:
        unfinished: bytes of a frame that has not arrived whole.

    Example:
        >>> frames = Frames(max_nbytes=16)
        >>> frames.feed_bytes(frame(b"one") + frame(b"two")[:5])
        [b'one']
        >>> frames.feed_bytes(frame(b"two")[5:])
        [b'two']
    """

    def __init__(self, max_nbytes: int, max_later: int | None = None) -> None:
        self._max_nbytes = max_nbytes
        self._max_later = max_nbytes if max_later is None else max_later
        self.unfinished = bytearray()

    def feed_bytes(self, data: bytes) -> list[bytes]:
        """Append incoming bytes; returns the bodies of the frames that they complete.

        Raises:
            FrameError: a length above the limit or below a CRC's, or a body with another CRC;
                the stream is unusable from there on.
        """
        if self.unfinished:
            self.unfinished += data
            bodies, end = self._split(self.unfinished)
            del self.unfinished[:end]
        else:  # most frames arrive whole
            bodies, end = self._split(data)
            if end < len(data):
                self.unfinished += data[end:]
        return bodies

    def _split(self, stream: bytes | bytearray) -> tuple[list[bytes], int]:
        """The bodies of the complete frames, and the offset of their end."""
        bodies, start, nbytes = [], 0, len(stream)
        while nbytes - start >= _PREFIX:
            length = int.from_bytes(stream[start : start + _PREFIX], "big")
            if not _CRC <= length <= self._max_nbytes + _CRC:
                raise _bad_length(bytes(stream[start : start + _PREFIX]), self._max_nbytes + _CRC)
            body, end = start + _PREFIX + _CRC, start + _PREFIX + length
            if nbytes < end:
                break
            bodies.append(_checked(stream[body - _CRC : body], bytes(stream[body:end])))
            start, self._max_nbytes = end, self._max_later
        return bodies, start


def _bad_length(prefix: bytes, most: int) -> FrameError:
    """The error of a length that is none; text of another protocol is shown as text."""
    expected = f"{_CRC} to {most}"
    if not (prefix.isascii() and prefix.decode().isprintable()):
        return FrameError("frame length", expected, int.from_bytes(prefix, "big"))
    what = "an HTTP server answers here" if prefix == b"HTTP" else "this is text"
    return FrameError("frame length", expected, prefix, f"{what}, not a side channel")


def _checked(crc: bytes | bytearray, body: bytes) -> bytes:
    computed = crc32(body)
    if computed != int.from_bytes(crc, "big"):
        raise FrameError("frame CRC", f"{computed:08x}", crc.hex())
    return body
