"""The router's settings, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from pdconn.router.access.cors import check_origin
from pdconn.router.access.tls import ServerTls
from pdconn.router.admission import budget, listener, queue
from pdconn.router.errors import BadSetting
from pdconn.router.fleet import health, loads
from pdconn.router.fleet.member import engine_name
from pdconn.router.fleet.sources import DNS, FleetSource, WatchedFile, parse_source
from pdconn.router.openai.requests import NAMES_MEMORY, XARGS
from pdconn.router.prefix.hashing import BadScheme, HashScheme
from pdconn.router.prefix.score import DEFAULT_WEIGHTS
from pdconn.router.routing import tokenize
from pdconn.router.routing.policy import POLICIES, Policy, PrefixAware, Role
from pdconn.router.tracing.spans import Tracing

ADMIN_ABOVE = 1000
"""The admin pages' port, if it is not given, lies so far above ``port``."""
LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """How a router runs: the options of ``pdconn proxy``.

    ``prefill`` and ``decode`` are words as ``parse_source`` reads them: base URLs with the
    endpoints of their KV events, or DNS names.  An engine may be in both, and in the file
    ``fleet`` too.  Port 0 takes any free port.

    ``pull_above`` is the fewest tokens that prefill pulls from another engine; None: it never does.
    ``reuse_tokens``: decode gets the token ids of a chat that prefill has computed.
    ``require_prefill`` refuses what decode would have to compute though it could be handed over.
    ``retries`` is how many other engines are asked after a failure; None: all.  A time-out of None
    does not end.  ``drain_delay_s`` passes between the end of readiness and the end of listening,
    and ``drain_timeout_s`` begins after it.

    Raises:
        BadSetting: a value makes no sense; ``field`` is its command-line option.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    fleet: str | None = None
    policy: str = PrefixAware.name
    alone_below: int = 256
    pull_above: int | None = None
    reuse_tokens: bool = False
    hash_algorithm: str | None = None
    hash_block_tokens: int | None = None
    hash_seed: str | None = None
    eagle_groups: tuple[int, ...] = ()
    weights: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_mib: float = 64.0
    max_bodies_mib: float = budget.MAX_NBYTES / (1 << 20)
    max_requests: int = queue.MAX_REQUESTS
    max_queue: int = 0
    queue_timeout_s: float = queue.WAIT_S
    stall_timeout_s: float = listener.STALL_S
    allow_xargs: tuple[str, ...] = ()
    retries: int | None = None
    connect_timeout_s: float = 5.0
    prefill_timeout_s: float | None = None
    request_timeout_s: float | None = None
    tokenize_timeout_s: float = tokenize.TIMEOUT_S
    health_timeout_s: float = health.PROBE_TIMEOUT_S
    lease_s: float = loads.LEASE_S
    drain_delay_s: float = 0.0
    drain_timeout_s: float = 30.0
    wait_s: float | None = None
    warm_up_s: float | None = None
    require_prefill: bool = False
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    api_key_file: str | None = None
    forward_authorization: bool = False
    engine_key_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    show_engines: bool = False
    cors_origins: tuple[str, ...] = ()
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        for option, words in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not words and self.fleet is None:
                raise BadSetting(option, "at least one URL", "none")
        self.sources()
        self.scheme()
        if self.policy not in POLICIES:
            raise BadSetting("--policy", f"one of {', '.join(POLICIES)}", self.policy)
        if self.alone_below < 0:
            raise BadSetting("--alone-below", "tokens, at least 0", self.alone_below)
        if self.pull_above is not None and self.pull_above < 1:
            raise BadSetting("--pull-above", "tokens, at least 1", self.pull_above)
        for medium, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise BadSetting("--weight", f"{medium}=NUMBER, at least 0", weight)
        self._check_listeners()
        if not (math.isfinite(self.max_body_mib) and self.max_body_nbytes >= 1):
            raise BadSetting("--max-body-mib", "MiB, more than 0", self.max_body_mib)
        self._check_admission()
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            expected = "a URL such as http://collector:4318/v1/traces"
            raise BadSetting("--otlp-traces-endpoint", expected, endpoint)
        self._check_times()
        for origin in self.cors_origins:
            check_origin(origin)

    def _check_times(self) -> None:
        for option, value, least in (
            ("--stall-timeout", self.stall_timeout_s, 0.001),
            ("--connect-timeout", self.connect_timeout_s, 0.001),
            ("--prefill-timeout", self.prefill_timeout_s, 0.001),
            ("--request-timeout", self.request_timeout_s, 0.001),
            ("--queue-timeout", self.queue_timeout_s, 0.001),
            ("--tokenize-timeout", self.tokenize_timeout_s, 0.001),
            ("--health-timeout", self.health_timeout_s, 0.001),
            ("--lease", self.lease_s, 0.001),
            ("--drain-delay", self.drain_delay_s, 0.0),
            ("--drain-timeout", self.drain_timeout_s, 0.0),
            ("--wait", self.wait_s, 0.0),
            ("--warm-up", self.warm_up_s, 0.0),
        ):
            if value is not None and not (math.isfinite(value) and value >= least):
                raise BadSetting(option, f"seconds, at least {least:g}", value)
        for option, number in (("--retries", self.retries), ("--max-queue", self.max_queue)):
            if number is not None and number < 0:
                raise BadSetting(option, "a number, at least 0", number)

    def _check_listeners(self) -> None:
        if not 0 <= self.port <= LAST_PORT:
            raise BadSetting("--port", f"a number from 0 to {LAST_PORT}", self.port)
        if not 0 <= self.effective_admin_port <= LAST_PORT:
            expected = f"a number from 0 to {LAST_PORT} (default: {ADMIN_ABOVE} above --port)"
            raise BadSetting("--admin-port", expected, self.effective_admin_port)
        if 0 < self.port == self.effective_admin_port and self.host == self.admin_host:
            raise BadSetting("--admin-port", "another port than --port", self.port)
        if self.tls_cert is None and self.tls_key is not None:
            raise BadSetting("--tls-cert", "a file beside --tls-key", None)
        if self.tls_key is None and self.tls_cert is not None:
            raise BadSetting("--tls-key", "a file beside --tls-cert", None)
        if self.forward_authorization and self.api_key_file is None:
            expected = "--api-key-file beside it; without keys Authorization is always passed on"
            raise BadSetting("--forward-authorization", expected, None)

    @property
    def effective_admin_port(self) -> int:
        """The port of the admin pages; 0 takes any free one."""
        if self.admin_port is not None:
            return self.admin_port
        return 0 if self.port == 0 else self.port + ADMIN_ABOVE

    @property
    def tells_models(self) -> bool:
        """Whether a client may know what engines list to the router: if its key is checked here."""
        return self.engine_key_file is None or self.api_key_file is not None

    @property
    def passes_authorization(self) -> bool:
        """Whether engines get a client's ``Authorization``: unless it is the router's key."""
        return self.api_key_file is None or self.forward_authorization

    def _check_admission(self) -> None:
        if not (math.isfinite(self.max_bodies_mib) and self.max_bodies_mib >= self.max_body_mib):
            expected = f"MiB, at least --max-body-mib ({self.max_body_mib:g})"
            raise BadSetting("--max-bodies-mib", expected, self.max_bodies_mib)
        if self.max_requests < 1:
            raise BadSetting("--max-requests", "a number, at least 1", self.max_requests)
        for name in self.allow_xargs:
            if not name or name in NAMES_MEMORY:
                raise BadSetting("--allow-xargs", "a name that clients may use", name)

    @property
    def max_body_nbytes(self) -> int:
        """The longest request body that is read."""
        return int(self.max_body_mib * (1 << 20))

    @property
    def max_bodies_nbytes(self) -> int:
        """Of all request bodies that are held at once."""
        return int(self.max_bodies_mib * (1 << 20))

    @property
    def xargs(self) -> frozenset[str]:
        """Names that clients may use in ``vllm_xargs``."""
        return frozenset((*XARGS, *self.allow_xargs))

    @classmethod
    def of(cls, prefill: Sequence[str], decode: Sequence[str], **settings: object) -> Self:
        """From the words of a command line."""
        return cls(prefill=tuple(prefill), decode=tuple(decode), **settings)  # type: ignore[arg-type]

    def sources(self) -> tuple[FleetSource, ...]:
        """The sources of the fleet.

        Raises:
            BadSetting: a word makes no sense, or names an engine twice in one role.
        """
        sources: list[FleetSource] = []
        for option, role, words in (
            ("--prefill", Role.PREFILL, self.prefill),
            ("--decode", Role.DECODE, self.decode),
        ):
            sources += (parse_source(option, word, {role}) for word in words)
            urls = [word.partition(",")[0].removeprefix(DNS) for word in words]
            names = [engine_name(option, url) for url in urls]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise BadSetting(option, "each URL once", twice)
        if self.fleet is not None:
            sources.append(WatchedFile(self.fleet))
        return tuple(sources)

    def scheme(self) -> HashScheme | None:
        """How every engine hashes its blocks; None to detect it from KV events.

        Raises:
            BadSetting: one of its two options is missing, or makes no sense.
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
            option = f"--hash-{error.field.replace('_', '-')}"
            raise BadSetting(option, error.expected, error.seen) from error

    @property
    def most_tries(self) -> int | None:
        """Engines of one role that a request may be sent to; None: all."""
        return None if self.retries is None else self.retries + 1

    @property
    def decodes_alone(self) -> bool:
        """Whether decode computes prompts itself that could not be handed over."""
        return not self.require_prefill

    def make_tls(self) -> ServerTls | None:
        """The certificate for clients; None where they connect in the clear.

        Raises:
            BadSetting: a file is missing or wrong.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key)

    def make_tracing(self) -> Tracing:
        """Where the traces of requests go; nowhere without an endpoint.

        Raises:
            BadSetting: OpenTelemetry is not installed.
        """
        if self.otlp_traces_endpoint is None:
            return Tracing()
        try:
            from pdconn.router.tracing.otel import OtelTracing

            return OtelTracing(self.otlp_traces_endpoint)
        except ImportError as error:
            expected = "OpenTelemetry beside it: pip install 'pdconn[otel]'"
            raise BadSetting("--otlp-traces-endpoint", expected, str(error)) from error

    def make_policy(self) -> Policy:
        """A new policy."""
        if self.policy == PrefixAware.name:
            return PrefixAware(self.alone_below)
        return POLICIES[self.policy]()
