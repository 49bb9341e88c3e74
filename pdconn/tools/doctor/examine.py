"""Runs the selected checks one after another, and collects their results.

Each step gathers facts and judges them.  ``log_step`` is called at the start of each step, since
some take seconds: NIXL starts in a child process, unreachable hosts time out, prompts are computed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from pdconn.router.fleet.member import Member, Role, merged
from pdconn.router.fleet.sources import FleetSource
from pdconn.router.router_errors import BadSetting
from pdconn.sidechannel.security import Security, SecurityError, is_loopback
from pdconn.tools.doctor.diagnosis import Diagnosis
from pdconn.tools.doctor.findings import Checked, Finding, checked, fault
from pdconn.tools.doctor.fleet import (
    advertised,
    channels,
    engines,
    event_endpoints,
    golden,
    traffic,
)
from pdconn.tools.doctor.given import given_config, judge
from pdconn.tools.doctor.local import (
    credential_files,
    devices,
    host_limits,
    side_channel_port,
    store_folder,
    ucx,
    used,
    versions,
)
from pdconn.tools.doctor.probe import ProbeFacts, judge_probe, read_probe, seen_probe
from pdconn.tools.output.progress_line import LogStep
from pdconn.tools.plan.link import Link
from pdconn.vllm.config import ConfigError, Settings
from pdconn.vllm.memory.card import kv_card


@dataclass(frozen=True)
class ChannelCredentials:
    """Credentials for side channels, in the engines' form; ``tls`` by the engines' keys."""

    secret_file: str | None = None
    tls: Mapping[str, str | None] = field(default_factory=dict)
    check_hostname: bool = True


@dataclass(frozen=True)
class FleetQuestions:
    """The running engines to examine, and the checks to run.

    Attributes:
        sources: sources of engines; without any, no engine's HTTP is checked.
        prefill_channels, decode_channels: ``host:port`` or description files.
        api_key: for the engines' HTTP; trusted: CAs for its TLS.
        asks_golden: whether to send a golden prompt through the pairs.
        hash_seed: the engines' PYTHONHASHSEED.
        timeout_s: per engine.
    """

    sources: tuple[FleetSource, ...] = ()
    prefill_channels: tuple[str, ...] = ()
    decode_channels: tuple[str, ...] = ()
    api_key: str | None = None
    trusted: ssl.SSLContext | None = None
    asks_golden: bool = False
    hash_seed: str | None = None
    timeout_s: float = 5.0


@dataclass(frozen=True)
class Questions:
    """The subjects to examine.

    Attributes:
        local: whether to check this host.
        configs: engine configurations; a single one's files and ports are also tried here.
        link: nominal bandwidth; None if unknown.
        probe: address of ``pdconn doctor --serve``.
        ucx_logs: UCX output of engines.
        environ, root: variables and file system of this host.
    """

    local: bool = True
    configs: tuple[given_config.GivenConfig, ...] = ()
    fleet: FleetQuestions = FleetQuestions()
    credentials: ChannelCredentials = field(default_factory=ChannelCredentials)
    link: Link | None = None
    probe: tuple[str, int] | None = None
    ucx_logs: tuple[used.UsedTransports, ...] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    asks_nixl: bool = True

    @property
    def engine(self) -> given_config.GivenConfig | None:
        """The engine of ``configs``, if it is the only one."""
        return self.configs[0] if len(self.configs) == 1 else None

    @property
    def engine_environ(self) -> Mapping[str, str]:
        """The environment of that engine; without one, ours."""
        return self.environ if self.engine is None else self.engine.engine_environment(self.environ)


def examine(questions: Questions, log_step: LogStep = lambda text: None) -> Diagnosis:
    """Run every check.

    Raises:
        BadSetting: the fleet file is wrong.
    """
    checks: list[Checked] = []
    # First: an invalid file ends the command.
    members = asyncio.run(_members(questions.fleet.sources))
    settings = None
    if questions.engine is not None:
        settings, _ = judge.settings_of_given(questions.engine, questions.environ)
    if questions.local:
        decodes = [urlsplit(one.url).hostname or "" for one in members if Role.DECODE in one.roles]
        checks += _local(questions, settings, decodes, log_step)
    measured = None
    if questions.probe is not None:
        log_step("reading from the other host")
        measured = read_probe(*questions.probe, log_step)
        judged = judge_probe(measured, questions.link)
        checks.append(checked("probe", judged, seen_probe(measured)))
    if (
        questions.fleet.sources
        or questions.fleet.prefill_channels
        or questions.fleet.decode_channels
    ):
        checks += asyncio.run(_fleet(questions, members, settings, measured, log_step))
    if questions.ucx_logs:
        checks.append(used.check_used(questions.ucx_logs))
    return Diagnosis(checks)


# --- this host ----------------------------------------------------------------------------


def _local(
    questions: Questions, settings: Settings | None, decodes: Sequence[str], log_step: LogStep
) -> Iterator[Checked]:
    transport = "nixl" if settings is None else settings.transport
    found = versions.read_versions()
    judged = versions.judge_versions(found, transport)
    yield checked("versions", judged, versions.seen_versions(found))
    host = devices.read_devices(questions.root)
    wants = settings is None or settings.huge_pages
    limited = host_limits.read_limits(questions.root)
    yield checked(
        "limits", host_limits.judge_limits(limited, host, wants_huge_pages=wants),
        host_limits.seen_limits(limited),
    )  # fmt: skip
    refused_card, chosen = _kv_card(questions, settings)
    seen = devices.seen_devices(host), *chosen, *devices.ucx_lines(host)
    yield checked("devices", refused_card, *seen)
    yield _ucx(questions, settings, host, log_step)
    if not questions.configs:
        yield Checked("config", skipped="no --config given")
    for engine in questions.configs:
        yield _config(engine, questions.environ)
    yield from _credentials(questions, settings)
    yield _port(questions, settings, decodes)
    root = None if settings is None or settings.store is None else settings.store.root
    if root is not None and _is_elsewhere(questions, root):
        yield Checked("store", skipped=f"{root} is in the container: run this there")
    elif settings is not None and settings.store is not None:
        log_step("trying the store's folder")
        kept = store_folder.read_store(settings.store)
        judged = store_folder.judge_store(kept, settings.store)
        yield checked("store", judged, store_folder.seen_store(kept, settings.store))


def _kv_card(questions: Questions, settings: Settings | None) -> tuple[list[Finding], list[str]]:
    """The findings and log lines about the network card that carries KV."""
    engine = questions.engine
    if settings is None or engine is None or not engine.has_addresses_of_host:
        return [], []
    try:
        return [], [kv_card(settings, questions.engine_environ).sentence]
    except ConfigError as error:
        message = f"expected {error.expected}, got {error.seen}"
        remedy = 'set "kv_interface" to one of them, or leave it out'
        return [fault("devices.kv-interface", error.field, message, remedy)], []


def _ucx(
    questions: Questions, settings: Settings | None, host: devices.Devices, log_step: LogStep
) -> Checked:
    transport = "nixl" if settings is None else settings.transport
    answer = None
    if questions.asks_nixl and transport != "ucx" and find_spec("nixl") is not None:
        log_step("starting NIXL in a process of its own")
        options = {} if settings is None else settings.backend_options
        answer = ucx.ask_ucx(options, questions.engine_environ)
    facts = ucx.read_ucx(questions.engine_environ, answer)
    return checked("ucx", ucx.judge_ucx(facts, host, transport), *ucx.seen_ucx(facts))


def _is_elsewhere(questions: Questions, path: str) -> bool:
    """Whether a file of the engine is in its container, not on this host."""
    in_container = questions.engine is not None and questions.engine.in_container
    return in_container and not Path(path).exists()


def _config(engine: given_config.GivenConfig, environ: Mapping[str, str]) -> Checked:
    _, refused = judge.settings_of_given(engine, environ)
    ours = engine.ours or {}
    role = (engine.transfer or {}).get("kv_role")
    keys = ", ".join(map(str, engine.extra)) or "no key"
    seen = f"{ours.get('kv_connector')}, {role}, {keys}"
    # Problems of files are findings of the check of credentials, with their own remedies.
    ours_alone = [error for error in refused if not isinstance(error.__cause__, SecurityError)]
    name = f"config {engine.name}" if engine.name else "config"
    return checked(name, judge.judge_given(engine, ours_alone), seen)


def _several(questions: Questions) -> str | None:
    """The reason why no engine's settings are compared with this host; None if they are."""
    if len(questions.configs) < 2:
        return None
    return f"{len(questions.configs)} engines in --config: name one, as FILE#NAME"


def _credentials(questions: Questions, settings: Settings | None) -> Iterator[Checked]:
    engine = questions.engine
    why = _several(questions)
    if engine is not None and judge.names_unseen_files(engine):
        why = "the files are in the container: run this there"
    if why is not None:
        yield Checked("credentials", skipped=why)
        return
    extra = {} if engine is None else engine.extra
    files = {
        key: extra.get(key) or questions.credentials.tls.get(key)
        for key in ("tls_cert", "tls_key", "tls_ca")
    }
    secret = extra.get("secret_file") or questions.credentials.secret_file
    facts = credential_files.read_credentials(secret, files, questions.engine_environ)
    lends = (
        engine is not None and engine.lends and (engine.is_host_network or not engine.in_container)
    )
    listens_at = settings.side_channel_host if settings is not None and lends else None
    named = None
    if settings is not None and lends and settings.security.check_hostname:
        named = judge.named_host(settings, questions.engine_environ)
    now = time.time()
    judged = credential_files.judge_credentials(facts, listens_at=listens_at, named=named, now=now)
    yield checked("credentials", judged, credential_files.seen_credentials(facts, now))


def _port(questions: Questions, settings: Settings | None, decodes: Sequence[str]) -> Checked:
    """Whether an engine can listen at its address, and whether decode can reach it there."""
    engine = questions.engine
    if _several(questions) is not None or settings is None or engine is None or not engine.lends:
        why = _several(questions) or "no --config of an engine that lends"
        return Checked("port", skipped=why)
    found: list[Finding] = []
    first = settings.side_channel_port
    host = settings.side_channel_host
    if is_loopback(settings.advertise_host or host):
        isolated = not engine.has_addresses_of_host
        found += side_channel_port.judge_loopback(f"{host}:{first}", decodes, is_isolated=isolated)
    if not engine.has_addresses_of_host:
        if found:
            return checked("port", found, f"{host}:{first}, in a network of its own")
        why = "the engine has addresses that are not this host's: run this where it runs"
        return Checked("port", skipped=why)
    tried = [
        side_channel_port.read_port(host, port, settings.security)
        for port in range(first, min(first + engine.num_ports, 1 << 16))
    ]
    found += [finding for one in tried for finding in side_channel_port.judge_port(one)]
    return checked("port", found, *map(str, tried))


# --- the fleet ----------------------------------------------------------------------------


async def _fleet(
    questions: Questions,
    members: Sequence[Member],
    settings: Settings | None,
    measured: ProbeFacts | None,
    log_step: LogStep,
) -> list[Checked]:
    made: list[Checked] = []
    async with engines.client_session(
        questions.fleet.timeout_s, questions.fleet.api_key, questions.fleet.trusted
    ) as session:
        found: Sequence[engines.EngineFacts] = ()
        if members:
            log_step(f"asking {len(members)} engines")
            found = await engines.read_engines(members, session)
            judged = [*engines.judge_engines(found), *engines.judge_agreement(found)]
            made.append(checked("engines", judged, *engines.seen_engines(found)))
            made.append(_traffic(found))
            made.append(await _events(members, questions, log_step))
        tried: Sequence[golden.GoldenFacts] = ()
        if questions.fleet.asks_golden:
            check, tried = await _golden(found, session, log_step)
            made.append(check)
    lengths = [m.max_model_len for one in found for m in one.models if m.max_model_len is not None]
    times = _times(questions, settings, max(lengths, default=None), measured)
    return made + _channels(questions, tried, times, log_step)


def _traffic(found: Sequence[engines.EngineFacts]) -> Checked:
    up = [one for one in found if one.error is None]
    if not up:
        return Checked("traffic", skipped="no engine answers")
    lines = [traffic.seen_traffic(one.url, traffic.traffic_of(one.metrics)) for one in up]
    return checked("traffic", traffic.judge_traffic(up), *lines)


def _times(
    questions: Questions,
    settings: Settings | None,
    max_tokens: int | None,
    measured: ProbeFacts | None,
) -> channels.PullTimes | None:
    """The bounds of a pull: the speed of a probe, if measured, else of the link."""
    speed = None if questions.link is None else questions.link.bytes_per_s
    if is_measured := measured is not None and measured.error is None:
        speed = measured.pull_bytes_per_s
    if speed is None or max_tokens is None:
        return None
    lease = 30.0 if settings is None else settings.kv_lease_duration
    timeout = 120.0 if settings is None else settings.read_timeout
    return channels.PullTimes(max_tokens, speed, lease, timeout, is_measured)


async def _members(sources: Sequence[FleetSource]) -> tuple[Member, ...]:
    found: list[Member] = []
    for source in sources:
        try:
            members = await source.members()
        finally:
            await source.close()
        if not members:
            raise BadSetting("fleet", "an engine behind each name", "a name without addresses")
        found += members
    return merged(found)


async def _events(members: Sequence[Member], questions: Questions, log_step: LogStep) -> Checked:
    if not any(member.events for member in members):
        return Checked("events", skipped="no engine is given with events=")
    log_step("asking for KV events")
    facts = await event_endpoints.read_events(
        members, questions.fleet.hash_seed, questions.fleet.timeout_s
    )
    return checked(
        "events", event_endpoints.judge_events(facts), *event_endpoints.seen_events(facts)
    )


async def _golden(
    found: Sequence[engines.EngineFacts], session: aiohttp.ClientSession, log_step: LogStep
) -> tuple[Checked, Sequence[golden.GoldenFacts]]:
    pairs = golden.golden_pairs(found)
    if not pairs:
        return Checked("golden", skipped="no pair of prefill and decode answers"), ()
    facts = []
    for number, (prefill, decode) in enumerate(pairs, 1):
        log_step(f"golden prompt {number} of {len(pairs)}")
        nonce = f"Golden {secrets.token_hex(6)}"
        facts.append(await golden.read_golden(prefill, decode, session, nonce))
    return checked("golden", golden.judge_golden(facts), *map(golden.seen_golden, facts)), facts


def _channels(
    questions: Questions,
    tried: Sequence[golden.GoldenFacts],
    times: channels.PullTimes | None,
    log_step: LogStep,
) -> list[Checked]:
    """The check of every known side channel, and of each pair of them."""
    named = tuple(dict.fromkeys(one.advertised for one in tried if one.advertised))
    lenders = tuple(dict.fromkeys((*questions.fleet.prefill_channels, *named)))
    words = tuple(dict.fromkeys((*lenders, *questions.fleet.decode_channels)))
    if not words:
        why = "give --prefill-channel and --decode-channel, or --golden, whose tickets name them"
        return [Checked("channels", skipped=why)]
    try:
        security = Security.load(
            secret_file=questions.credentials.secret_file,
            tls_cert=questions.credentials.tls.get("tls_cert"),
            tls_key=questions.credentials.tls.get("tls_key"),
            tls_ca=questions.credentials.tls.get("tls_ca"),
            tls_check_hostname=questions.credentials.check_hostname,
            environ=questions.environ,
        )
    except SecurityError as error:
        remedy = "correct --secret-file, --tls-cert, --tls-key or --tls-ca of this command"
        found = fault("channel.our-credentials", error.field, error, remedy)
        return [checked("channels", [found])]
    log_step(f"asking {len(words)} side channels")
    facts = channels.read_channels(words, security, questions.fleet.timeout_s)
    by_option = {word: each for word, each in facts.items() if word not in named}
    judged = [
        *channels.judge_channels(by_option),
        *advertised.judge_advertised(tried, facts),
    ]
    pairs = channels.compare_pairs(
        [facts[word] for word in lenders], [facts[word] for word in questions.fleet.decode_channels]
    )
    made = [checked("channels", judged, *channels.seen_channels(facts))]
    if not pairs:
        return [*made, Checked("pairs", skipped="no described prefill and decode to compare")]
    judged = [*channels.judge_pairs(pairs)]
    if times is not None:
        judged += channels.judge_times(pairs, times)
    return [*made, checked("pairs", judged, *map(channels.seen_pair, pairs))]
