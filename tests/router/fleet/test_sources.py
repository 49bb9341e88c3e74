"""Sources of the fleet's members, and what happens when a source is broken."""

import asyncio
import os
import socket

import pytest

from pdconn.router.fleet.file import read_fleet
from pdconn.router.fleet.member import Member, Role, parse_member
from pdconn.router.fleet.sources import DnsName, FleetWatch, Static, WatchedFile, parse_source
from pdconn.router.router_errors import BadSetting
from tests.fakes.event_loop import in_loop, until
from transport.testing.inprocess.faults import ManualClock

P, D = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
A, B = Member("http://a:1", P), Member("http://b:1", D)


def entry(name: str) -> str:
    return f'[[engine]]\nurl = "http://{name}:1"\nroles = ["prefill"]\n'


def urls(members) -> list[str]:
    return [member.url for member in members]


def write(path, text: str) -> None:
    """As tools do it: a reader meets one version or the other."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


class Names:
    """A name server: set what it says."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.error: Exception | None = None
        self.answering = asyncio.Event()
        self.answering.set()
        self.num_asked = 0

    async def __call__(self, name: str) -> list[str]:
        self.num_asked += 1
        await self.answering.wait()
        if self.error is not None:
            raise self.error
        return self.addresses


def num_logged(caplog, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


# A file


@in_loop
async def test_a_file_is_read_again_when_it_is_another_one(tmp_path):
    path = tmp_path / "fleet.toml"
    write(path, entry("a"))
    source = WatchedFile(path)
    assert urls(await source.members()) == ["http://a:1"]
    write(path, entry("b"))  # as long as before
    assert urls(await source.members()) == ["http://b:1"]


@in_loop
async def test_a_file_that_did_not_change_is_not_read(tmp_path):
    path, read = tmp_path / "fleet.toml", []
    write(path, entry("a"))

    def reading(path):
        read.append(path)
        return read_fleet(path)

    source = WatchedFile(path, reading)
    first = await source.members()
    assert await source.members() is first
    assert len(read) == 1
    os.utime(path)
    await source.members()
    assert len(read) == 2  # the control: another version is read


@pytest.mark.parametrize("broken", ["", "[[engine", None])
@in_loop
async def test_a_broken_version_is_logged_once_and_the_last_good_one_stays(
    broken, tmp_path, caplog
):
    path = tmp_path / "fleet.toml"
    write(path, entry("a"))
    source = WatchedFile(path)
    await source.members()
    if broken is None:
        path.unlink()
    else:
        write(path, broken)
    for _ in range(3):
        assert urls(await source.members()) == ["http://a:1"]
    if broken is not None:
        assert num_logged(caplog, "fleet.toml: expected") == 1
    write(path, entry("b"))
    assert urls(await source.members()) == ["http://b:1"]


@in_loop
async def test_a_file_that_is_broken_from_the_start_is_refused(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text("[[engine", encoding="utf-8")
    with pytest.raises(BadSetting, match=r"fleet\.toml"):
        async with FleetWatch([WatchedFile(path)], lambda members: None):
            pass


# A name


@in_loop
async def test_each_address_of_a_name_is_an_engine_in_one_order():
    names = Names("10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2")
    like = parse_member("--decode", "http://pods:8000/x,events=tcp://{host}:5557", Role)
    source = DnsName(like, names)
    members = await source.members()
    assert urls(members) == [
        "http://10.0.0.1:8000/x",
        "http://10.0.0.2:8000/x",
        "http://[fd00::1]:8000/x",
    ]
    assert members[2].event_endpoints()[0].events == "tcp://[fd00::1]:5557"
    assert all(member.roles == frozenset(Role) for member in members)
    names.addresses.reverse()
    assert await source.members() == members


@pytest.mark.parametrize("error", [None, socket.gaierror(-2, "unknown"), UnicodeError("label")])
@in_loop
async def test_a_name_that_fails_keeps_its_engines_for_a_while(error, caplog):
    names, clock = Names("10.0.0.1"), ManualClock(100.0)
    source = DnsName(parse_member("-d", "http://pods:1", D), names, keep_s=60.0, clock=clock)
    good = await source.members()
    names.addresses, names.error = [], error
    for passed_s in (0.0, 30.0, 29.9):
        clock.advance(passed_s)
        assert await source.members() == good
    assert num_logged(caplog, "DNS fails") == 1
    for passed_s in (0.1, 0.0):
        clock.advance(passed_s)
        assert await source.members() == ()
    assert num_logged(caplog, "removing its engines") == 1
    names.addresses, names.error = ["10.0.0.2"], None
    assert urls(await source.members()) == ["http://10.0.0.2:1"]


@in_loop
async def test_a_good_answer_starts_the_while_anew():
    names, clock = Names("10.0.0.1"), ManualClock(100.0)
    source = DnsName(parse_member("-d", "http://pods:1", D), names, keep_s=60.0, clock=clock)
    for addresses in (["10.0.0.1"], [], ["10.0.0.1"], []):
        names.addresses = addresses
        assert await source.members() != ()
        clock.advance(50.0)


@in_loop
async def test_a_name_server_that_hangs_is_asked_one_question():
    names = Names("10.0.0.1")
    source = DnsName(parse_member("-d", "http://pods:1", D), names, timeout_s=20.0)
    good = await source.members()
    source._timeout_s = 0.02
    names.answering.clear()
    names.addresses = ["10.0.0.2"]
    for _ in range(3):
        assert await source.members() == good
    assert names.num_asked == 2
    source._timeout_s = 20.0
    names.answering.set()
    assert urls(await source.members()) == ["http://10.0.0.2:1"]  # the late answer counts
    source._timeout_s = 0.02
    names.answering.clear()
    await source.members()
    await source.close()  # while it hangs


@in_loop
async def test_localhost_is_a_name_like_any_other():
    source = parse_source("--prefill", "dns+http://localhost:8000", [Role.PREFILL])
    members = await source.members()
    assert "http://127.0.0.1:8000" in urls(members) or "http://[::1]:8000" in urls(members)
    assert all(member.roles == P for member in members)


@in_loop
async def test_a_name_that_does_not_exist_holds_no_engines(caplog):
    source = parse_source("--prefill", "dns+http://unknown.invalid:8000", [Role.PREFILL])
    assert await source.members() == ()
    assert num_logged(caplog, "DNS fails") == 1


@pytest.mark.parametrize("word", ["dns+https://pods:1", "dns+pods", "dns+http://pods:1,rank=2"])
def test_a_name_without_sense_is_refused_with_its_option(word):
    with pytest.raises(BadSetting) as caught:
        parse_source("--decode", word, [Role.DECODE])
    assert caught.value.field == "--decode"


# The watch


class GivenSource:
    """A source that says what it is set to say."""

    def __init__(self, *members: Member) -> None:
        self.now = members
        self.closed = False

    async def members(self):
        await asyncio.sleep(0)
        return self.now

    async def close(self) -> None:
        self.closed = True


@in_loop
async def test_the_watch_tells_of_changes_only_and_of_the_first_fleet_at_once():
    source, seen = GivenSource(A), []
    async with FleetWatch([Static((B,)), source], seen.append, interval_s=60.0) as watch:
        assert seen == [(B, A)]
        await watch.refresh_now()
        assert len(seen) == 1
        source.now = ()
        assert await watch.refresh_now() == (B,)
        assert seen[1:] == [(B,)]
    assert source.closed


@in_loop
async def test_the_watch_asks_by_itself(tmp_path):
    path, seen = tmp_path / "fleet.toml", []
    write(path, entry("a"))
    async with FleetWatch([WatchedFile(path)], seen.append, interval_s=0.01):
        write(path, entry("a") + entry("b"))
        await until(lambda: len(seen) == 2)
    assert urls(seen[1]) == ["http://a:1", "http://b:1"]


@in_loop
async def test_one_engine_listed_twice_is_one_with_both_roles():
    seen = []
    twin = Member("http://a:1", D)
    async with FleetWatch([Static((A,)), Static((twin,))], seen.append):
        assert seen == [(Member("http://a:1", P | D),)]


@in_loop
async def test_the_watch_survives_its_listener_and_notifies_again(caplog):
    calls = []

    def fail_once(members):
        calls.append(members)
        if len(calls) == 2:
            raise ArithmeticError("once")

    source = GivenSource(A)
    async with FleetWatch([source], fail_once, interval_s=0.01):
        source.now = (A, B)
        await until(lambda: len(calls) == 3)
        await asyncio.sleep(0.05)
    assert calls == [(A,), (A, B), (A, B)]
    assert num_logged(caplog, "polling the fleet failed") == 1


@in_loop
async def test_an_old_answer_that_comes_late_is_not_the_last_word():
    class Slow(GivenSource):
        async def members(self):
            answer = self.now
            await asyncio.sleep(0.05 if answer == (A,) else 0)
            return answer

    source, seen = Slow(A), []
    watch = FleetWatch([source], seen.append)
    first = asyncio.create_task(watch.refresh_now())
    await asyncio.sleep(0.01)
    source.now = (B,)
    await watch.refresh_now()
    await first
    assert seen == [(A,), (B,)]


@in_loop
async def test_refreshes_at_the_same_time_tell_once():
    seen = []
    watch = FleetWatch([GivenSource(A)], seen.append)
    await asyncio.gather(*(watch.refresh_now() for _ in range(5)))
    await watch.close()
    await watch.close()
    assert seen == [(A,)]
