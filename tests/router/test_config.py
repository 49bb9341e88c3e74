"""Settings of the router: every bad value names the option that it came by."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from pdconn.router.fleet.sources import DnsName, Static, WatchedFile
from pdconn.router.prefix.hashing import HashScheme
from pdconn.router.proxy_config import OPTIONS, ProxyConfig
from pdconn.router.router_errors import BadSetting
from pdconn.router.router_options import RouterOption
from pdconn.router.router_server import running_proxy
from pdconn.router.routing.policy import POLICIES, PrefixAware
from tests.project.docker.test_compose import proxy_config

URLS = (["http://p:1"], ["http://d:1"])


def config(**settings: Any) -> ProxyConfig:
    return ProxyConfig.from_options(*URLS, port=0, **settings)


@pytest.mark.parametrize(
    ("settings", "option", "seen"),
    [
        ({"policy": "prefx"}, "--policy", "prefx"),
        ({"policy": ""}, "--policy", ""),
        ({"alone_below": -1}, "--alone-below", -1),
        ({"hash_algorithm": "sha256"}, "--hash-block-tokens", None),
        ({"hash_block_tokens": 16}, "--hash-algorithm", None),
        ({"hash_algorithm": "md5", "hash_block_tokens": 16}, "--hash-algorithm", "md5"),
        ({"hash_algorithm": "sha256", "hash_block_tokens": 0}, "--hash-block-tokens", 0),
        ({"hash_algorithm": "sha256", "hash_block_tokens": -16}, "--hash-block-tokens", -16),
        ({"hash_algorithm": "xxhash", "hash_block_tokens": 16}, "--hash-seed", None),
        ({"weights": {"gpu": -0.1}}, "--weight", -0.1),
        ({"weights": {"gpu": 1.0, "disk": math.nan}}, "--weight", math.nan),
        ({"weights": {"gpu": math.inf}}, "--weight", math.inf),
    ],
)
def test_a_bad_value_names_its_option_and_is_shown(
    settings: dict[str, Any], option: str, seen: object
) -> None:
    with pytest.raises(BadSetting) as caught:
        config(**settings)
    assert caught.value.field == option
    assert str(caught.value).startswith(f"{option}: expected ")
    assert str(caught.value).endswith(f"got {seen!r}")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *({"policy": name} for name in POLICIES),
        {"alone_below": 0},
        {"hash_algorithm": "sha256", "hash_block_tokens": 16},
        {"hash_algorithm": "xxhash", "hash_block_tokens": 1, "hash_seed": "0"},
        {"hash_seed": "7"},
        {"weights": {}},
        {"weights": {"gpu": 0.0, "any other": 2}},
    ],
)
def test_good_values_beside_them_are_taken(settings: dict[str, Any]) -> None:
    """The control for the test above."""
    assert config(**settings).routing.make_policy().name == settings.get("policy", "prefix")


def test_what_was_set_is_what_is_used() -> None:
    assert config(alone_below=7).routing.make_policy() == PrefixAware(7)
    given = config(hash_algorithm="xxhash", hash_block_tokens=32, hash_seed="1").routing.scheme()
    assert given == HashScheme("xxhash", 32, "1")
    assert config(hash_seed="1").routing.scheme() is None  # found out, the seed is for that


@pytest.mark.parametrize("option", ["--prefill", "--decode"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at least one URL"),
        (["p:1"], "http://HOST:PORT"),
        (["http://p:1", "http://P:1/"], "each URL once"),
        (["http://p:1", "http://p:1,events=tcp://h:1"], "each URL once"),
        (["http://p:1,event=tcp://h:1"], "did you mean 'events'"),
        (["http://p:1,events=tcp://*:1"], "events: "),
        (["http://p:1,events=tcp://h:1,replay=h:2"], "replay: "),
        (["http://p:1,events=tcp://h:1,ranks=0"], "ranks: "),
        (["http://p:1,events=tcp://h:65535,ranks=2"], "events: a port"),
        (["http://p:1,ranks=2,ranks=2"], "one ranks=VALUE"),
        (["dns+p:1"], "dns+http://NAME:PORT"),
        (["dns+https://p:1"], "dns+http://NAME:PORT"),
        (["dns+http://:1"], "http://HOST:PORT"),
        (["dns+http://p:99999"], "http://HOST:PORT"),
        (["dns+http://p:1,event=tcp://h:1"], "did you mean 'events'"),
        (["dns+http://p:1", "dns+http://p:1,ranks=2"], "each URL once"),
    ],
)
def test_a_word_that_makes_no_sense_names_its_option(
    option: str, words: list[str], message: str
) -> None:
    both = {"--prefill": ["http://x:1"], "--decode": ["http://x:1"], option: words}
    with pytest.raises(BadSetting) as caught:
        ProxyConfig.from_options(both["--prefill"], both["--decode"])
    assert caught.value.field == option
    assert message in str(caught.value)


def test_each_word_is_a_source_and_the_file_one_more() -> None:
    events = "events=tcp://{host}:5557"
    given = ProxyConfig.from_options(
        ["http://p:1", f"dns+http://p.svc:1,{events}"], ["http://p:1"], fleet="fleet.toml"
    )
    kinds = [type(source) for source in given.engines.sources()]
    assert kinds == [Static, DnsName, Static, WatchedFile]


def test_a_fleet_file_stands_for_either_role(tmp_path: Path) -> None:
    assert len(ProxyConfig.from_options([], [], fleet=str(tmp_path / "x")).engines.sources()) == 1
    assert len(ProxyConfig.from_options(["http://p:1"], [], fleet="x").engines.sources()) == 2
    with pytest.raises(BadSetting, match="--decode: expected at least one URL"):
        ProxyConfig.from_options(["http://p:1"], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "fleet.toml: expected a file to read"),
        ("", "at least one"),
        ("[[engine]", "expected TOML"),
        ('[[engine]]\nurl = "http://p:1"\nroles = ["prefil"]', "engine 1: roles: "),
        ('[[engine]]\nurl = "http://p:1"\nrole = ["prefill"]', "did you mean 'roles'"),
    ],
)
def test_a_fleet_file_that_makes_no_sense_at_the_start_names_itself(
    tmp_path: Path, text: str | None, message: str
) -> None:
    """It is read as it is watched, so a router that starts says it and not its settings."""
    path = tmp_path / "fleet.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")

    async def start() -> None:
        async with running_proxy(ProxyConfig.from_options([], [], fleet=str(path), port=0)):
            pass

    with pytest.raises(BadSetting) as caught:
        asyncio.run(start())
    assert caught.value.field.startswith(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (["--require-prefill"], "engines.require_prefill", True),
        (["--retries", "2"], "times.most_tries", 3),
        ([], "times.most_tries", None),
        (["--prefill-timeout", "3"], "times.prefill_timeout_s", 3.0),
        (["--prefill-timeout", "auto"], "times.prefill_timeout_s", None),
        (["--prefill-timeout", "none"], "times.prefill_timeout_s", math.inf),
        (["--request-timeout", "4"], "times.request_timeout_s", 4.0),
        ([], "times.request_timeout_s", None),
        (["--tokenize-timeout", "5"], "times.tokenize_timeout_s", 5.0),
        (["--health-timeout", "6"], "times.health_timeout_s", 6.0),
        (["--lease", "120"], "times.lease_s", 120.0),
        (["--max-queue", "7"], "admission.max_queue", 7),
        (["--queue-timeout", "8"], "admission.queue_timeout_s", 8.0),
        (
            ["--cors-origin", "http://a", "https://b:1"],
            "listen.cors_origins",
            ("http://a", "https://b:1"),
        ),
        (["--otlp-traces-endpoint", "http://c:4318/v1/traces"], "traces.otlp_traces_endpoint", ...),
        (["--drain-delay", "9"], "times.drain_delay_s", 9.0),
        (["--hash-seed", "s"], "routing.hash_seed", "s"),
    ],
)
def test_an_option_reaches_its_setting(
    words: list[str], setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["proxy", "--prefill", *URLS[0], "--decode", *URLS[1], *words]
    assert attrgetter(setting)(proxy_config(command, monkeypatch)) == (
        words[1] if value is ... else value
    )


NONE_OF_THEM = {
    "prefill": ["http://x:1"],
    "decode": ["http://y:1"],
    "fleet": ["fleet.toml"],
    "policy": ["random"],
    "hash_algorithm": ["sha256", "--hash-block-tokens", "16"],
    "hash_block_tokens": ["16", "--hash-algorithm", "sha256"],
    "weights": ["gpu=0.5"],
    "streams": ["on"],
    "roles": ["dry-run", "--ttft-target", "2", "--itl-target", "0.05"],
    "forward_authorization": ["--api-key-file", "keys"],
    "tls_cert": ["cert", "--tls-key", "key"],
    "tls_key": ["key", "--tls-cert", "cert"],
    "cors_origins": ["http://a"],
    "max_body_mib": ["9"],
    "max_bodies_mib": ["99"],
    "otlp_traces_endpoint": ["http://c:1"],
}
"""Values that are no default, of options that do not take any text or number, or stand alone."""


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.flag)
def test_every_option_of_the_table_reaches_its_setting_and_no_other(
    row: RouterOption, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [] if isinstance(row.default, bool) else ["7"]
    words = NONE_OF_THEM.get(row.name, plain)
    engines = ["proxy", "--prefill", *URLS[0], "--decode", *URLS[1]]
    before = settings_of(proxy_config(engines, monkeypatch))
    after = settings_of(proxy_config([*engines, row.flag, *words], monkeypatch))
    named = {row.flag, *(word for word in words if word.startswith("--"))}
    changed = {name for name, value in after.items() if value != before[name]}
    assert changed == {one.name for one in OPTIONS if one.flag in named}


def settings_of(config: ProxyConfig) -> dict[str, Any]:
    parts = (getattr(config, part.name) for part in fields(config))
    return {one.name: getattr(part, one.name) for part in parts for one in fields(part)}


def test_every_setting_is_in_the_table_once() -> None:
    names = [row.name for row in OPTIONS]
    assert len(set(names)) == len(names) == len({row.flag for row in OPTIONS})
    assert set(names) == settings_of(config()).keys()


@pytest.mark.parametrize("settings", [{"prot": 1}, {"port_s": 1}])
def test_a_setting_that_no_row_has_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(settings))):
        config(**settings)


_DEFAULTS = re.compile(r"`(--[a-z-]+)` \((\d+(?:\.\d+)?)(?: s)?\)")


def wrong_defaults(page: str) -> list[str]:
    """Of a page, the defaults that are written after an option and are not the table's."""
    known = {row.flag: row.default for row in OPTIONS}
    found = _DEFAULTS.findall(page)
    assert len(found) >= 5
    return [flag for flag, text in found if float(text) != known.get(flag)]


def test_the_docs_write_the_defaults_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/router.md").read_text(encoding="utf-8")
    assert wrong_defaults(page) == []
    changed = page.replace("`--connect-timeout` (5 s)", "`--connect-timeout` (6 s)")
    assert wrong_defaults(changed) == ["--connect-timeout"]
