"""An engine as people write it: on the command line, and in a fleet file."""

import pytest

from pdconn.router.fleet.file import read_fleet
from pdconn.router.fleet.member import Member, Role, merged, parse_member
from pdconn.router.router_errors import BadSetting

P, D = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
WORD = "http://10.0.0.1:8000,events=tcp://{host}:5557,replay=tcp://{host}:5657,ranks=2"


def test_a_word_holds_everything_of_an_engine():
    member = parse_member("--prefill", WORD, [Role.PREFILL])
    assert member == Member(
        "http://10.0.0.1:8000", P, "tcp://{host}:5557", "tcp://{host}:5657", ranks=2
    )
    assert member.event_endpoints() == (
        (0, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657"),
        (1, "tcp://10.0.0.1:5558", "tcp://10.0.0.1:5658"),
    )


@pytest.mark.parametrize(
    ("url", "template", "endpoint"),
    [
        ("http://gate:1", "tcp://{host}:5557", "tcp://gate:5557"),
        ("http://gate", "tcp://{host}:5557", "tcp://gate:5557"),
        ("http://[fd00::1]:1", "tcp://{host}:5557", "tcp://[fd00::1]:5557"),
        ("http://gate:1", "tcp://[fd00::2]:5557", "tcp://[fd00::2]:5557"),
        ("http://gate:1", "tcp://other.host-1:5557", "tcp://other.host-1:5557"),
    ],
)
def test_the_host_of_an_endpoint_is_the_url_s_or_its_own(url, template, endpoint):
    assert Member(url, P, template).event_endpoints() == ((0, endpoint, None),)


def test_an_engine_without_events_has_no_endpoints():
    assert parse_member("--decode", "http://a:1/", Role).event_endpoints() == ()


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("http://a:1,evnts=tcp://a:1", "did you mean 'events'"),
        ("http://a:1,rank=2", "did you mean 'ranks'"),
        ("http://a:1,", "known keys: events, replay, ranks"),
        ("http://a:1,ranks", "one ranks=VALUE"),
        ("http://a:1,ranks=1,ranks=1", "one ranks=VALUE"),
        ("http://a:1,ranks=0", "ranks: a whole number from 1"),
        ("http://a:1,ranks=-1", "ranks: a whole number"),
        ("http://a:1,ranks=99999999999999", "ranks: a whole number"),
        ("http://a:1,events=tcp://*:5557", "events: tcp://{host}:PORT"),
        ("http://a:1,events=tcp://{hots}:5557", "events: tcp://{host}:PORT"),
        ("http://a:1,events=ipc:///tmp/x", "events: tcp://{host}:PORT"),
        ("http://a:1,events=tcp://a:0", "events: a port from 1"),
        ("http://a:1,events=tcp://a:65535,ranks=2", "each of 2 ranks"),
        ("http://a:1,replay=tcp://a:5558", "replay: events beside it"),
        ("http://a:1,events=tcp://a:5557,replay=tcp://a:5557", "1 \\(ranks\\) away"),
        ("http://a:1,events=tcp://{host}:5557,replay=tcp://a:5558,ranks=2", "2 \\(ranks\\) away"),
        ("a:1,ranks=2", "http://HOST:PORT"),
    ],
)
def test_a_word_without_sense_is_refused_with_its_option(word, words):
    with pytest.raises(BadSetting, match=words) as caught:
        parse_member("--prefill", word, [Role.PREFILL])
    assert caught.value.field == "--prefill"


@pytest.mark.parametrize(
    "word",
    [
        "http://a:1,events=tcp://a:65534,ranks=2",  # the last rank has the last port
        "http://a:1,events=tcp://a:5557,replay=tcp://a:5558",  # one rank each
        "http://a:1,events=tcp://a:5557,replay=tcp://b:5558,ranks=2",  # hosts differ
        "http://a:1,events=tcp://a:5558,replay=tcp://a:5556,ranks=2",  # side by side
    ],
)
def test_what_just_fits_is_taken(word):
    """The control for the test above."""
    parse_member("--prefill", word, [Role.PREFILL])


def test_an_engine_is_valid_once_built():
    with pytest.raises(BadSetting, match="http://a:1"):
        Member("http://A:1/", P)
    with pytest.raises(BadSetting, match="at least one role"):
        Member("http://a:1", frozenset())


def test_an_engine_that_two_tell_of_is_one():
    publishing = Member("http://a:1", D, "tcp://a:5557", ranks=2)
    once = merged([Member("http://a:1", P), Member("http://b:1", P, draining=True), publishing])
    assert once == (
        Member("http://a:1", P | D, "tcp://a:5557", ranks=2),
        Member("http://b:1", P, draining=True),
    )
    assert merged([publishing, Member("http://a:1", D, draining=True)])[0].draining


@pytest.fixture
def fleet(tmp_path):
    def read(text):
        path = tmp_path / "fleet.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_fleet(path)

    return read


GOOD = """
[[engine]]
url = "http://A:1/"
roles = ["prefill", "decode"]
events = "tcp://{host}:5557"
replay = "tcp://{host}:5657"
ranks = 2
draining = true

[[engine]]
url = "http://b:1"
roles = ["decode"]
"""


def test_a_file_holds_the_fleet_in_its_order(fleet):
    assert fleet(GOOD) == (
        Member("http://a:1", P | D, "tcp://{host}:5557", "tcp://{host}:5657", 2, draining=True),
        Member("http://b:1", D),
    )


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ("draining =", "drain =", "engine 1: drain", "did you mean 'draining'"),
        ("ranks = 2", "ranks = true", "engine 1: ranks", "a whole number, got True"),
        ("ranks = 2", 'ranks = "2"', "engine 1: ranks", "a whole number"),
        ("ranks = 2", "ranks = 200", "engine 1: replay", r"200 \(ranks\) away"),
        ("draining = true", "draining = 1", "engine 1: draining", "true or false"),
        ('["decode"]', '"decode"', "engine 2: roles", "a list"),
        ('["decode"]', '["deocde"]', "engine 2: roles", "any of prefill, decode"),
        ('["decode"]', "[1]", "engine 2: roles", "any of prefill, decode"),
        ('["decode"]', '["decode", "decode"]', "engine 2: roles", "each role once"),
        ('["decode"]', "[]", "engine 2: roles", "at least one role"),
        ('roles = ["decode"]', "", "engine 2: roles", "nothing"),
        ('url = "http://b:1"', "", "engine 2: url", "nothing"),
        ("http://b:1", "b:1", "engine 2: url", "http://HOST:PORT"),
        ("http://b:1", "http://A:1", "engine 2: url", "other than engine 1's"),
        ("tcp://{host}:5557", "tcp://*:5557", "engine 1: events", "connect to"),
    ],
)
def test_the_first_mistake_in_a_file_is_named(fleet, old, new, field, words):
    assert old in GOOD
    with pytest.raises(BadSetting, match=words) as caught:
        fleet(GOOD.replace(old, new))
    assert caught.value.field.endswith(f"fleet.toml: {field}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"at least one \[\[engine\]\]"),
        ("engine = []", r"at least one \[\[engine\]\]"),
        ("[engine]", "double brackets"),
        ("engine = [1]", "a table"),
        ("[[engines]]", r"nothing but \[\[engine\]\]"),
        ("[[engine", "TOML"),
        (b"\xff", "TOML"),
        ("a = " + "[" * 5000, "TOML"),
    ],
)
def test_a_file_that_is_no_fleet_is_refused(fleet, text, words):
    with pytest.raises(BadSetting, match=words) as caught:
        fleet(text)
    assert "fleet.toml" in caught.value.field


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadSetting, match="No such file"):
        read_fleet(tmp_path / "none.toml")
