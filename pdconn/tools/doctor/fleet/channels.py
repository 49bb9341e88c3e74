"""Reads the side channels of engines, and compares every pair of prefill and decode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdconn.planning.comparison import compare
from pdconn.planning.plan import Pairing
from pdconn.planning.planning_errors import Incompatible
from pdconn.protocol.errors import ProtocolError
from pdconn.protocol.messages import Described, check_geometry
from pdconn.puller.warmup import Place
from pdconn.sidechannel.connection import SideChannelLost, Unauthenticated
from pdconn.sidechannel.describe import describe
from pdconn.sidechannel.security import Security
from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.findings import Finding, fault, one_line, warning
from pdconn.tools.doctor.fleet.traffic import SMALL_RUN_NBYTES
from pdconn.tools.doctor.local.host_limits import sized
from registration import AttentionKind, RegistrationError

_AT_ONCE = 16
_RUNS_OF_A_BLOCK = 4
"""Blocks below this many of the smallest good runs are small in any layout."""
_ENOUGH = 2.0
"""Recommended ratio of the lease to the longest pull."""
CREDENTIALS = "give --secret-file, --tls-cert, --tls-key and --tls-ca as that engine has them"


@dataclass(frozen=True, slots=True)
class ChannelFacts:
    """The description of an engine at ``where``, or the error."""

    where: str
    described: Described | None = None
    error: str | None = None
    is_refused: bool = False


def check_channel(option: str, word: str) -> str:
    """Check that an option names a side channel or a description file.

    Raises:
        BadQuestion: it names neither.
    """
    if Path(word).is_file():
        return word
    try:
        return str(Place.parse(word))
    except ValueError as error:
        raise BadQuestion(option, f"{error}, or an existing description file", word) from None


def read_channels(
    words: Sequence[str], security: Security, timeout_s: float
) -> dict[str, ChannelFacts]:
    """Query all side channels concurrently and read the files, by word."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda word: _channel(word, security, timeout_s), words)
        return dict(zip(words, found, strict=True))


def _channel(where: str, security: Security, timeout_s: float) -> ChannelFacts:
    path = Path(where)
    if path.is_file():
        try:
            described = msgspec.json.decode(path.read_bytes(), type=Described)
            check_geometry(described)
        except (
            OSError, msgspec.DecodeError, RegistrationError, ProtocolError, RecursionError
        ) as error:  # fmt: skip
            return ChannelFacts(where, error=f"no description of an engine: {one_line(error)}")
        return ChannelFacts(where, described)
    place = Place.parse(where)
    try:
        return ChannelFacts(where, describe(place.host, place.port, timeout_s, security))
    except Unauthenticated as error:
        return ChannelFacts(where, error=one_line(error), is_refused=True)
    except (OSError, SideChannelLost, ProtocolError) as error:
        return ChannelFacts(where, error=one_line(str(error).removeprefix(f"{where}: ")))


def seen_channels(channels: Mapping[str, ChannelFacts]) -> list[str]:
    """One line per channel."""
    return [
        f"{where}: {facts.error}"
        if facts.described is None
        else f"{where}: engine {facts.described.engine_id}, {len(facts.described.ranks)} ranks, "
        f"protocol {facts.described.version}"
        for where, facts in channels.items()
    ]


def judge_channels(
    channels: Mapping[str, ChannelFacts],
) -> Iterator[Finding]:
    """Findings about channels that do not answer."""
    for where, facts in channels.items():
        if facts.error is None:
            continue
        if facts.is_refused:
            yield fault("channel.credentials", where, facts.error, CREDENTIALS)
        else:
            remedy = (
                "start that engine, or correct the option; its side_channel_host must be an "
                "address that this host reaches, not loopback of another, past any firewall"
            )
            yield fault("channel.unreachable", where, facts.error, remedy)


@dataclass(frozen=True, slots=True)
class PairFacts:
    """A possible pull by decode from prefill, derived from their descriptions.

    Attributes:
        obstacles: reasons why a pull is impossible.
        run_nbytes: mean bytes per run, over one block of each group.
        block_nbytes: bytes of a block in the largest group.
        token_nbytes: bytes per token of full attention that the busiest decode rank pulls.
    """

    prefill: str
    decode: str
    obstacles: tuple[str, ...]
    run_nbytes: int = 0
    block_nbytes: int = 0
    token_nbytes: float = 0.0


def compare_pairs(
    prefill: Sequence[ChannelFacts], decode: Sequence[ChannelFacts]
) -> list[PairFacts]:
    """Compare every prefill engine with every decode engine that described itself."""
    return [
        _pair(lender, reader)
        for lender in prefill
        for reader in decode
        if lender.described is not None and reader.described is not None
    ]


def _pair(lender: ChannelFacts, reader: ChannelFacts) -> PairFacts:
    assert lender.described is not None
    assert reader.described is not None
    comparison = compare(lender.described, reader.described)
    obstacles = tuple(map(str, (*comparison.traits, *comparison.b_pulls)))
    if obstacles:
        return PairFacts(lender.where, reader.where, obstacles)
    runs = nbytes = largest = 0
    busiest = 0.0
    theirs = [rank.references for rank in lender.described.ranks]
    for rank in reader.described.ranks:
        try:
            pairing = Pairing.between(rank.references, theirs, rank.tp_rank)
        except Incompatible as error:  # compare() has reported it already
            return PairFacts(lender.where, reader.where, (one_line(error),))
        of_token = 0.0
        for template in pairing.templates:
            runs += len(template.nbytes)
            nbytes += template.sub_block_nbytes
            largest = max(largest, template.sub_block_nbytes)
            if rank.references.groups[template.our_group].kind is AttentionKind.FULL:
                of_token += template.sub_block_nbytes / template.sub_block_tokens
        busiest = max(busiest, of_token)
    return PairFacts(lender.where, reader.where, (), nbytes // max(1, runs), largest, busiest)


def seen_pair(pair: PairFacts) -> str:
    """One line about a pair."""
    between = f"{pair.decode} from {pair.prefill}"
    if pair.obstacles:
        return f"{between}: cannot pull"
    return (
        f"{between}: can pull, {pair.run_nbytes:,} bytes per run, {pair.token_nbytes:,.0f} a token"
    )


def judge_pairs(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Findings about pairs that cannot pull, or only slowly."""
    for pair in pairs:
        subject = f"{pair.decode} from {pair.prefill}"
        if pair.obstacles:
            message = f"decode cannot pull: {'; '.join(pair.obstacles)}"
            remedy = f"start both alike; pdconn diff {pair.prefill} {pair.decode} shows all fields"
            yield fault("pair.diff", subject, message, remedy)
        elif pair.run_nbytes < SMALL_RUN_NBYTES <= pair.block_nbytes // _RUNS_OF_A_BLOCK:
            message = f"{pair.run_nbytes:,} bytes per run: expected at least {SMALL_RUN_NBYTES:,}"
            remedy = (
                "choose head-major blocks (VLLM_KV_CACHE_LAYOUT=BHLNC), or a larger --block-size"
            )
            yield warning("pair.small-runs", subject, message, remedy)


@dataclass(frozen=True, slots=True)
class PullTimes:
    """The bounds of the longest pull: tokens, the link, and two settings in seconds.

    ``is_measured``: the speed was measured by a probe, not given by a link's name.
    """

    max_tokens: int
    bytes_per_s: float
    lease_s: float
    read_timeout_s: float
    is_measured: bool = False

    @property
    def speed(self) -> str:
        """The speed in words."""
        what = "measured" if self.is_measured else "link's"
        return f"at the {what} {self.bytes_per_s / 1e9:.3g} GB/s"

    def pull_seconds(self, pair: PairFacts) -> float:
        """Minimum seconds of a pull of the longest prompt: that of its full attention."""
        return pair.token_nbytes * self.max_tokens / self.bytes_per_s


def judge_times(pairs: Sequence[PairFacts], times: PullTimes) -> Iterator[Finding]:
    """Findings about pulls that exceed the read timeout or the lease."""
    for pair in pairs:
        if pair.obstacles:
            continue
        seconds, nbytes = times.pull_seconds(pair), int(pair.token_nbytes * times.max_tokens)
        subject = f"{pair.decode} from {pair.prefill}"
        what = f"a pull of {times.max_tokens:,} tokens ({sized(nbytes)})"
        pull = f"{what} takes {seconds:.1f} s {times.speed}"
        if seconds >= times.read_timeout_s:
            message = f"{pull}, and read_timeout is {times.read_timeout_s:g} s: it would fail"
            remedy = f'set "read_timeout": {math.ceil(_ENOUGH * seconds)} on decode, or more'
            yield fault("pair.read-timeout", subject, message, remedy)
        elif seconds * _ENOUGH > times.lease_s:
            message = f"{pull}, and the lease is {times.lease_s:g} s: it rests on renewals"
            remedy = f'set "kv_lease_duration": {math.ceil(_ENOUGH * seconds)} on prefill, or more'
            yield warning("pair.lease", subject, message, remedy)
