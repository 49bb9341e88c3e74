"""Settings of the router: every bad value names the option that it came by."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from pdconn.router.config import ProxyConfig
from pdconn.router.errors import BadSetting
from pdconn.router.fleet.sources import DnsName, Static, WatchedFile
from pdconn.router.prefix.hashing import HashScheme
from pdconn.router.routing.policy import POLICIES, PrefixAware
from pdconn.router.server import running_proxy
from tests.project.docker.test_compose import proxy_config

URLS = (["http://p:1"], ["http://d:1"])


def config(**settings: Any) -> ProxyConfig:
    return ProxyConfig.of(*URLS, port=0, **settings)


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
    assert config(**settings).make_policy().name == settings.get("policy", "prefix")


def test_what_was_set_is_what_is_used() -> None:
    assert config(alone_below=7).make_policy() == PrefixAware(7)
    given = config(hash_algorithm="xxhash", hash_block_tokens=32, hash_seed="1").scheme()
    assert given == HashScheme("xxhash", 32, "1")
    assert config(hash_seed="1").scheme() is None  # found out, the seed is for that


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
        ProxyConfig.of(both["--prefill"], both["--decode"])
    assert caught.value.field == option
    assert message in str(caught.value)


def test_each_word_is_a_source_and_the_file_one_more() -> None:
    events = "events=tcp://{host}:5557"
    given = ProxyConfig.of(
        ["http://p:1", f"dns+http://p.svc:1,{events}"], ["http://p:1"], fleet="fleet.toml"
    )
    kinds = [type(source) for source in given.sources()]
    assert kinds == [Static, DnsName, Static, WatchedFile]


def test_a_fleet_file_stands_for_either_role(tmp_path: Path) -> None:
    assert len(ProxyConfig.of([], [], fleet=str(tmp_path / "x")).sources()) == 1
    assert len(ProxyConfig.of(["http://p:1"], [], fleet="x").sources()) == 2
    with pytest.raises(BadSetting, match="--decode: expected at least one URL"):
        ProxyConfig.of(["http://p:1"], [])


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
        async with running_proxy(ProxyConfig.of([], [], fleet=str(path), port=0)):
            pass

    with pytest.raises(BadSetting) as caught:
        asyncio.run(start())
    assert caught.value.field.startswith(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (["--require-prefill"], "require_prefill", True),
        (["--retries", "2"], "most_tries", 3),
        ([], "most_tries", None),
        (["--prefill-timeout", "3"], "prefill_timeout_s", 3.0),
        (["--request-timeout", "4"], "request_timeout_s", 4.0),
        ([], "request_timeout_s", None),
        (["--tokenize-timeout", "5"], "tokenize_timeout_s", 5.0),
        (["--health-timeout", "6"], "health_timeout_s", 6.0),
        (["--lease", "120"], "lease_s", 120.0),
        (["--max-queue", "7"], "max_queue", 7),
        (["--queue-timeout", "8"], "queue_timeout_s", 8.0),
        (["--cors-origin", "http://a", "https://b:1"], "cors_origins", ("http://a", "https://b:1")),
        (["--otlp-traces-endpoint", "http://c:4318/v1/traces"], "otlp_traces_endpoint", ...),
        (["--drain-delay", "9"], "drain_delay_s", 9.0),
        (["--hash-seed", "s"], "hash_seed", "s"),
    ],
)
def test_an_option_reaches_its_setting(
    words: list[str], setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["proxy", "--prefill", *URLS[0], "--decode", *URLS[1], *words]
    assert getattr(proxy_config(command, monkeypatch), setting) == (
        words[1] if value is ... else value
    )
