"""Which engines are up, in which order they are asked, and how they are named."""

import pytest

from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.member import Role, engine_name
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting, EngineFailure
from pdconn.router.routing.policy import Candidate, RoundRobin, RouteQuery

QUESTION = RouteQuery(num_tokens=1)


def test_engines_take_turns_and_the_others_follow():
    policy = RoundRobin()
    names = [Candidate(name) for name in "abc"]
    decisions = [policy.decide(QUESTION, names, ()) for _ in range(4)]
    assert [tried(one.prefill) for one in decisions] == ["abc", "bca", "cab", "abc"]


def test_roles_take_turns_apart():
    policy = RoundRobin()
    policy.decide(QUESTION, [Candidate("a"), Candidate("b")], ())
    decision = policy.decide(QUESTION, (), [Candidate("x"), Candidate("y")])
    assert (tried(decision.prefill), tried(decision.decode)) == ("", "xy")


def tried(ordered):
    return "".join(one.candidate.engine for one in ordered)


def test_an_engine_that_is_down_is_not_offered_until_it_is_up():
    engines = EngineRegistry(["a", "b"], ["b", "c"])
    engines.mark_down("b", "refused")
    assert engines.live(Role.PREFILL) == ("a",)
    assert engines.live(Role.DECODE) == ("c",)
    assert engines.mark_up("b")
    assert not engines.mark_up("b")
    assert engines.live(Role.DECODE) == ("b", "c")
    assert engines.names == ("a", "b", "c")


def test_probes_of_a_dead_engine_become_rare_and_start_anew():
    engines = EngineRegistry(["a"], ["b"])
    waits = [engines.mark_down("a", "refused").backoff_s for _ in range(7)]
    assert waits == [1, 2, 4, 8, 15, 15, 15]
    for _ in range(5000):
        engines.mark_down("a", "refused")
    assert engines.outage("a").backoff_s == 15
    engines.mark_up("a")
    assert engines.mark_down("a", "refused").backoff_s == 1


def test_misses_name_each_engine_once_the_tried_ones_first():
    engines = EngineRegistry(["a", "b", "c"], ["d"])
    engines.mark_down("a", "was down")
    engines.mark_down("b", "newer")
    tried = [EngineFailure("b", "just tried")]
    assert engines.failures(Role.PREFILL, tried) == (
        EngineFailure("b", "just tried"),
        EngineFailure("a", "was down"),
    )


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://localhost:8100", "http://localhost:8100"),
        ("http://LOCALHOST:8100/", "http://localhost:8100"),
        ("https://gate/engines/P0/", "https://gate/engines/P0"),
        ("http://[::1]:8100", "http://[::1]:8100"),
        ("http://gate:1/v1x", "http://gate:1/v1x"),
    ],
)
def test_an_engine_has_one_name(url, name):
    assert engine_name("--prefill", url) == name


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8100",
        "8100",
        "",
        "ftp://host:1",
        "http://",
        "http://host:port",
        "http://host:70000",
        "http://host:0",
        "http://user:secret@host:1",
        "http://host:1/?a=b",
        "http://host:1/#x",
        "http://ho st:1",
        "http://[::1:8100",
        "http://host:1/v1",
        "http://host:1/v1/",
        "http://gate/p0/v1/completions",
    ],
)
def test_a_url_that_names_no_engine_is_refused_with_its_option(url):
    with pytest.raises(BadSetting, match="--decode: expected") as caught:
        engine_name("--decode", url)
    assert caught.value.field == "--decode"


def test_the_base_url_of_openai_s_clients_is_answered_with_the_engine_s() -> None:
    with pytest.raises(BadSetting, match="did you mean 'http://gate:1/p0'") as caught:
        engine_name("--prefill", "http://gate:1/p0/v1")
    assert "without /v1" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"prefill": []}, "--prefill"),
        ({"decode": []}, "--decode"),
        ({"prefill": ["http://a:1", "http://A:1/"]}, "--prefill"),
        ({"port": 65536}, "--port"),
        ({"port": -1}, "--port"),
        ({"max_body_mib": 0.0}, "--max-body-mib"),
        ({"connect_timeout_s": 0.0}, "--connect-timeout"),
        ({"connect_timeout_s": float("nan")}, "--connect-timeout"),
        ({"drain_timeout_s": -1.0}, "--drain-timeout"),
        ({"wait_s": float("inf")}, "--wait"),
    ],
)
def test_a_setting_without_sense_is_refused_with_its_option(settings, field):
    with pytest.raises(BadSetting) as caught:
        ProxyConfig.from_options(
            **{"prefill": ["http://a:1"], "decode": ["http://b:1"], **settings}
        )
    assert caught.value.field == field


def test_one_engine_may_hold_both_roles():
    config = ProxyConfig.from_options(["http://a:1"], ["http://a:1/"])
    listed = [member for source in config.engines.sources() for member in source.engines]
    assert [member.url for member in listed] == ["http://a:1"] * 2
    assert EngineRegistry.from_members(listed).roles("http://a:1") == tuple(Role)
