"""The router's settings.  Every option is declared once, as a field of a record.

::

    OPTIONS ──► parser, --help, docs/cli.md, what SIGHUP reads again
       └──────► ProxyConfig.from_options(...) ──► records by subject, each checked once it is built

Fields are declared with :mod:`pdconn.router.router_options`.  The command line is checked in the
order of the records and of their fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, get_type_hints

from pdconn.router.access.listen_settings import ListenSettings
from pdconn.router.admission import listener, places
from pdconn.router.fleet import health, loads
from pdconn.router.fleet.member import Role, engine_name
from pdconn.router.fleet.sources import DNS, FleetSource, WatchedFile, parse_source
from pdconn.router.handover.prefetch import SessionSettings
from pdconn.router.openai.requests import NAMES_MEMORY, XARGS
from pdconn.router.prefix.hashing import ALGORITHMS, BadScheme, HashScheme
from pdconn.router.prefix.score import DEFAULT_WEIGHTS
from pdconn.router.roles.role_settings import RoleSettings
from pdconn.router.router_errors import BadSetting
from pdconn.router.router_options import (
    CheckedSettings,
    RouterOption,
    Unfit,
    each,
    limit,
    number,
    option,
    options_of,
    parse_limit,
    seconds,
    switch,
)
from pdconn.router.routing import tokenize
from pdconn.router.routing.policy import POLICIES, Policy, PrefixAware
from pdconn.router.tracing.spans import Tracing

_MIB = 1 << 20


def _weight(word: str) -> tuple[str, float]:
    medium, found, weight = word.partition("=")
    try:
        if found and medium:
            return medium.lower(), float(weight)
    except ValueError as error:
        raise Unfit("MEDIUM=NUMBER", word) from error
    raise Unfit("MEDIUM=NUMBER", word)


def _check_weights(weights: Mapping[str, float]) -> None:
    for medium, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise Unfit(f"{medium}=NUMBER, at least 0", weight)


def _check_xarg(name: str) -> None:
    if not name or name in NAMES_MEMORY:
        raise Unfit("a name that clients may use", name)


def _check_url(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise Unfit("a URL such as http://collector:4318/v1/traces", url)


@dataclass(frozen=True, slots=True)
class EngineSettings(CheckedSettings):
    """The engines.

    ``prefill`` and ``decode`` are in the syntax of ``parse_source``: base URLs with the endpoints
    of their KV events, or DNS names.  An engine may be in both, and in the file ``fleet`` too.
    """

    prefill: tuple[str, ...] = option((), "URL", says="engines that compute prompts", several="+")
    decode: tuple[str, ...] = option((), "URL", says="engines that generate answers", several="+")
    fleet: str | None = option(
        None, "FILE", says="TOML file of engines, polled for changes", is_reloaded=True
    )
    require_prefill: bool = switch(
        "answer 503 if decode would have to compute a prompt that could have been handed over, "
        "because no prefill engine answers, it lends nothing, or the ticket has been used"
    )

    def check_together(self) -> None:
        for flag, words in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not words and self.fleet is None:
                raise BadSetting(flag, "at least one URL", "none")
        self.sources()

    def sources(self) -> tuple[FleetSource, ...]:
        """The sources of the fleet.

        Raises:
            BadSetting: a word is malformed, or names an engine twice in one role.
        """
        sources: list[FleetSource] = []
        for flag, role, words in (
            ("--prefill", Role.PREFILL, self.prefill),
            ("--decode", Role.DECODE, self.decode),
        ):
            sources += (parse_source(flag, word, {role}) for word in words)
            urls = [word.partition(",")[0].removeprefix(DNS) for word in words]
            names = [engine_name(flag, url) for url in urls]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise BadSetting(flag, "each URL once", twice)
        if self.fleet is not None:
            sources.append(WatchedFile(self.fleet))
        return tuple(sources)

    @property
    def decodes_alone(self) -> bool:
        """Whether decode computes prompts that could not be handed over."""
        return not self.require_prefill


@dataclass(frozen=True, slots=True)
class RoutingSettings(CheckedSettings):
    """How engines are chosen.

    ``pull_above`` is the smallest number of tokens that prefill pulls from another engine.  With
    ``reuse_tokens`` decode receives the token ids of a chat from prefill.
    """

    policy: str = option(PrefixAware.name, says="how to choose engines", choices=tuple(POLICIES))
    alone_below: int = option(
        256,
        "TOKENS",
        number(what="tokens"),
        "decode serves a prompt alone if it holds a prefix and lacks at most this many tokens",
        parse=int,
    )
    pull_above: int | None = option(
        None,
        "TOKENS",
        number(1, "tokens"),
        "let prefill pull a prefix from another engine that holds at least this many tokens more "
        "of it, if that is faster; every engine needs kv_role kv_both",
        parse=int,
        unset="never",
    )
    reuse_tokens: bool = switch(
        "decode takes a chat's token ids from prefill instead of rendering and tokenizing it "
        "again; other requests are handed over as usual"
    )
    hash_algorithm: str | None = option(
        None,
        says="the engines' --prefix-caching-hash-algo",
        choices=tuple(ALGORITHMS),
        unset="detected",
    )
    hash_block_tokens: int | None = option(
        None,
        "TOKENS",
        says="tokens of one hashed block; with --hash-algorithm",
        parse=int,
        unset="detected",
    )
    hash_seed: str | None = option(None, "SEED", says="the engines' PYTHONHASHSEED", unset="unset")
    eagle_groups: tuple[int, ...] = option(
        (),
        "N",
        says="index of a KV cache group that an EAGLE or MTP drafter reads; repeatable",
        flag="--eagle-group",
        parse=int,
        several="append",
    )
    weights: Mapping[str, float] = option(
        DEFAULT_WEIGHTS,
        "MEDIUM=W",
        _check_weights,
        "worth of a cached block by its medium (gpu=1 cpu=0.8 storage=0.5 fs=0.5 remote=0.3 "
        "obj=0.3, others 1)",
        flag="--weight",
        parse=_weight,
        several="append",
        collect=lambda given: {**DEFAULT_WEIGHTS, **dict(given)},
    )

    def check_together(self) -> None:
        self.scheme()

    def scheme(self) -> HashScheme | None:
        """The hash scheme of every engine; None to detect it from KV events.

        Raises:
            BadSetting: one of the two options is missing or invalid.
        """
        if self.hash_algorithm is None and self.hash_block_tokens is None:
            return None
        if self.hash_algorithm is None:
            raise BadSetting("--hash-algorithm", "a name beside --hash-block-tokens", None)
        if self.hash_block_tokens is None:
            raise BadSetting("--hash-block-tokens", "a number beside --hash-algorithm", None)
        try:
            return HashScheme(self.hash_algorithm, self.hash_block_tokens, self.hash_seed)
        except BadScheme as error:
            flag = f"--hash-{error.field.replace('_', '-')}"
            raise BadSetting(flag, error.expected, error.seen) from error

    def make_policy(self) -> Policy:
        """A new policy."""
        if self.policy == PrefixAware.name:
            return PrefixAware(self.alone_below)
        return POLICIES[self.policy]()


@dataclass(frozen=True, slots=True)
class StreamSettings(CheckedSettings):
    """Whether decode is asked before prefill has answered, and when."""

    streams: str = option(
        "off",
        says="ask decode while prefill computes, so that it pulls at the same time; the engines "
        "need a pdconn that knows early tickets",
        choices=("on", "off"),
    )
    stream_chunk: int = option(
        8192,
        "TOKENS",
        number(what="tokens"),
        "with --streams, ask decode once the requests of this proxy before this one at its prefill "
        "engine have at most this many tokens to compute: a step of prefill",
        parse=int,
    )
    max_streams: int = option(
        64,
        "N",
        number(),
        "with --streams, let at most this many requests wait for prefill at one decode engine; "
        "others are handed over as usual",
        parse=int,
    )

    @property
    def are_on(self) -> bool:
        """Whether there are any."""
        return self.streams == "on"


(STREAMS,) = (row for row in options_of(StreamSettings) if row.name == "streams")
"""``--streams``, which ``pdconn demo`` passes on."""


@dataclass(frozen=True, slots=True)
class TimeSettings(CheckedSettings):
    """Time-outs and retries.  None means no time-out, and as ``retries`` all engines.

    ``prefill_timeout_s`` is learned if it is None, and ``math.inf`` for no time-out.
    ``drain_delay_s`` passes between the end of readiness and the end of listening;
    ``drain_timeout_s`` starts after it.
    """

    wait_s: float | None = option(
        None,
        "SECONDS",
        seconds(0),
        "before listening, wait up to this long for the engines' /health",
        parse=float,
        unset="no wait",
    )
    warm_up_s: float | None = option(
        None,
        "SECONDS",
        seconds(0),
        "before listening, hand a short prompt over between all engines, for at most this long; "
        "later also for engines that join or come back",
        parse=float,
        unset="no warm-up",
    )
    drain_delay_s: float = option(
        0.0,
        "SECONDS",
        seconds(0),
        "on SIGTERM, first answer /readyz with 503 for this long and serve on",
        parse=float,
    )
    drain_timeout_s: float = option(
        30.0,
        "SECONDS",
        seconds(0),
        "on SIGTERM, wait up to this long for running requests",
        parse=float,
    )
    retries: int | None = option(
        None,
        "N",
        number(),
        "after a failure, ask at most this many other engines of the role",
        parse=int,
        unset="all",
    )
    connect_timeout_s: float = option(
        5.0, "SECONDS", seconds(), "time-out of connecting to an engine", parse=float
    )
    prefill_timeout_s: float | None = option(
        None,
        "SECONDS",
        limit,
        "wait this long for prefill's ticket, then ask another engine: auto for several times what "
        "it usually takes, 3 s at least; none for no time-out",
        parse=parse_limit,
        unset="auto",
    )
    request_timeout_s: float | None = option(
        None,
        "SECONDS",
        seconds(),
        "answer 504 this long after a request arrived, or break its answer off",
        parse=float,
        unset="no time-out",
    )
    tokenize_timeout_s: float = option(
        tokenize.TIMEOUT_S,
        "SECONDS",
        seconds(),
        "route a prompt without its tokens if no engine returns them in this time",
        parse=float,
    )
    health_timeout_s: float = option(
        health.PROBE_TIMEOUT_S,
        "SECONDS",
        seconds(),
        "time-out of an engine's /health",
        parse=float,
    )
    lease_s: float = option(
        loads.LEASE_S,
        "SECONDS",
        seconds(),
        "the engines' kv_lease_duration: a third of it is the time to return a ticket",
        parse=float,
    )

    @property
    def most_tries(self) -> int | None:
        """Maximum engines of one role that a request is sent to; None for all."""
        return None if self.retries is None else self.retries + 1


@dataclass(frozen=True, slots=True)
class AdmissionSettings(CheckedSettings):
    """Limits of what clients may send and hold."""

    max_body_mib: float = option(
        64.0, "MIB", says="answer longer request bodies with 413", parse=float
    )
    max_bodies_mib: float = option(
        places.MAX_NBYTES / _MIB,
        "MIB",
        says="answer 503 while all request bodies together would be longer",
        parse=float,
    )
    max_requests: int = option(
        places.MAX_REQUESTS,
        "N",
        number(1),
        "serve this many requests at a time; more wait, or get 503",
        parse=int,
    )
    max_queue: int = option(
        0, "N", number(), "of the requests above --max-requests, let this many wait", parse=int
    )
    queue_timeout_s: float = option(
        places.WAIT_S,
        "SECONDS",
        seconds(),
        "answer 503 to a request that has waited this long",
        parse=float,
    )
    stall_timeout_s: float = option(
        listener.STALL_S,
        "SECONDS",
        seconds(),
        "close a client's connection that does not send its request or read its answer",
        parse=float,
    )
    allow_xargs: tuple[str, ...] = option(
        (),
        "NAME",
        each(_check_xarg),
        f"further names that clients may use in vllm_xargs (always: {', '.join(XARGS)})",
        several="+",
    )

    def check_together(self) -> None:
        if not (math.isfinite(self.max_body_mib) and self.max_body_nbytes >= 1):
            raise BadSetting("--max-body-mib", "MiB, more than 0", self.max_body_mib)
        if not (math.isfinite(self.max_bodies_mib) and self.max_bodies_mib >= self.max_body_mib):
            expected = f"MiB, at least --max-body-mib ({self.max_body_mib:g})"
            raise BadSetting("--max-bodies-mib", expected, self.max_bodies_mib)

    @property
    def max_body_nbytes(self) -> int:
        """Bytes of the longest request body."""
        return int(self.max_body_mib * _MIB)

    @property
    def max_bodies_nbytes(self) -> int:
        """Bytes of all request bodies together."""
        return int(self.max_bodies_mib * _MIB)

    @property
    def xargs(self) -> frozenset[str]:
        """Names that clients may use in ``vllm_xargs``."""
        return frozenset((*XARGS, *self.allow_xargs))


@dataclass(frozen=True, slots=True)
class TraceSettings(CheckedSettings):
    """Trace export, and what the access log has of prompts."""

    otlp_traces_endpoint: str | None = option(
        None,
        "URL",
        _check_url,
        "export a trace of every request there, such as http://collector:4318/v1/traces; "
        "needs pdconn[otel]",
        unset="no traces",
    )
    log_blocks: bool = switch(
        "put digests of a prompt's blocks into the access log, for pdconn plan --trace; with "
        "--log-format json"
    )

    def make_tracing(self) -> Tracing | None:
        """The exporter of request traces; None without an endpoint.

        Raises:
            BadSetting: OpenTelemetry is not installed.
        """
        if self.otlp_traces_endpoint is None:
            return None
        try:
            from pdconn.router.tracing.otel import OtelTracing

            return OtelTracing(self.otlp_traces_endpoint)
        except ImportError as error:
            expected = "OpenTelemetry beside it: pip install 'pdconn[otel]'"
            raise BadSetting("--otlp-traces-endpoint", expected, str(error)) from error


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The settings of a router: the options of ``pdconn proxy``, by subject."""

    engines: EngineSettings
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    streams: StreamSettings = field(default_factory=StreamSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    listen: ListenSettings = field(default_factory=ListenSettings)
    times: TimeSettings = field(default_factory=TimeSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    traces: TraceSettings = field(default_factory=TraceSettings)
    roles: RoleSettings = field(default_factory=RoleSettings)

    @classmethod
    def from_options(cls, prefill: Sequence[str], decode: Sequence[str], **settings: Any) -> Self:
        """Settings from command-line words, and other settings by their names in ``OPTIONS``.

        Raises:
            BadSetting: a value is invalid; ``field`` is its command-line option.
            TypeError: there is no setting of that name.

        >>> ProxyConfig.from_options(["http://p:1"], ["http://d:1"], port=9).listen.port
        9
        """
        settings |= {"prefill": tuple(prefill), "decode": tuple(decode)}
        names = {part: [row.name for row in options_of(kind)] for part, kind in _PARTS.items()}
        unknown = settings.keys() - {name for part in names.values() for name in part}
        if unknown:
            raise TypeError(f"no setting of the router: {', '.join(sorted(unknown))}")
        return cls(
            **{
                part: kind(**{name: settings[name] for name in names[part] if name in settings})
                for part, kind in _PARTS.items()
            }
        )


_PARTS: Mapping[str, type[Any]] = get_type_hints(ProxyConfig)

OPTIONS: tuple[RouterOption, ...] = tuple(
    row for kind in _PARTS.values() for row in options_of(kind)
)
"""Every option of the router, in the order of ``pdconn proxy --help``."""

RELOADED = tuple(row.flag for row in OPTIONS if row.is_reloaded)
"""Options that name files which SIGHUP reads again."""
