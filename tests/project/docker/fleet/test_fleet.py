"""The fleet in real containers: ``make compose``.

One fleet is brought up for this file.  The tests run in order: the controls at the end need the
cores and the memory of engines that the tests before them have used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from tests.project.docker.debian import NoEngine, Say, builder, engine, run, why_not
from tests.project.docker.fleet.__main__ import built, printing
from tests.project.docker.fleet.checks import Checks, elsewhere
from tests.project.docker.fleet.containers import ALONE, MODEL, Card, Fleet, fleet, until, variant
from tests.project.docker.fleet.images import Image, look
from tests.project.docker.fleet.traffic import MAX_TOKENS, fresh, send
from tests.project.docker.prometheus import asked, on_the_base_image, programs

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def say() -> Say:
    return printing()


@pytest.fixture(scope="module")
def docker(say: Say) -> Iterator[None]:
    """A Docker Engine."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        try:
            stack.enter_context(engine(say))
        except NoEngine as failure:
            pytest.skip(str(failure))
        yield


@pytest.fixture(scope="module")
def images(docker: None, say: Say) -> list[Image]:
    """Both images, built."""
    return built(say)


@pytest.fixture(scope="module")
def running(
    images: list[Image], say: Say, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The fleet, healthy."""
    with fleet(tmp_path_factory.mktemp("compose"), say) as made:
        say("all healthy")
        yield made


@pytest.fixture(scope="module")
def checks(running: Fleet, say: Say) -> Checks:
    return Checks(running, say)


def test_the_engines_image_is_its_wheels_and_ten_percent_at_most(images: list[Image]) -> None:
    engines, _ = images
    assert 1.0 < engines.nbytes / engines.wheels_nbytes <= 1.10


def test_the_routers_image_has_at_most_250_mb(images: list[Image]) -> None:
    _, router = images
    assert router.nbytes <= 250e6


def test_no_image_holds_a_compiler_or_a_packed_wheel(images: list[Image]) -> None:
    for image in images:
        assert image.wheels_nbytes > 50e6
        assert image.compilers == ()
        assert image.packed == ()


def test_a_compiler_and_a_packed_wheel_are_seen(images: list[Image], say: Say) -> None:
    """The control of the test above."""
    _, router = images
    made = router.name.replace(":", "-with-more:")
    script = f"FROM {router.name}\nUSER 0\nRUN ln -s /bin/sh /usr/bin/g++ && touch /srv/a.whl\n"
    run([builder(), "build", "--tag", made, "-"], input=script)
    try:
        seen = look(made)
    finally:
        run(["docker", "rmi", made])
    assert seen.compilers == ("g++",)
    assert seen.packed == ("/srv/a.whl",)


def test_answers_are_those_of_one_engine_alone(checks: Checks) -> None:
    step = checks.same_answers(200)
    assert step.ok
    assert step.num_requests == 200
    assert step.more["pulls"] >= 150  # short prompts have no whole block to pull


def test_kv_goes_over_its_own_network_alone(checks: Checks) -> None:
    assert checks.kv_elsewhere() == []


def test_the_published_port_is_the_router(running: Fleet) -> None:
    (prompt,) = fresh(1, 100, seed=3)
    assert send("http://127.0.0.1:8000", prompt).answer is not None
    assert "pdconn_router_engine_up" in Client("http://127.0.0.1:9000").get_text("/metrics")


def test_limits_of_the_file_are_in_force(running: Fleet) -> None:
    for service in running.stack.running():
        if "profiles" not in running.stack.services[service]:
            host = running.inspect(service)["HostConfig"]
            assert host["NanoCpus"] == 2e9
            assert host["Memory"] in (2 << 30, 6 << 30)
            assert host["CapDrop"] == ["ALL"]


@pytest.mark.parametrize("service", ["p1", "d1", "router"])
def test_a_kill_loses_no_request_but_those_it_cuts(checks: Checks, service: str) -> None:
    assert checks.killed(service).ok


def test_a_prefill_engine_that_stands_still_loses_no_request(checks: Checks) -> None:
    assert checks.paused("p2").ok


def test_a_network_that_goes_and_comes_back_loses_no_request(checks: Checks) -> None:
    assert checks.unplugged("d2").ok


@pytest.mark.parametrize(("service", "drained"), [("p1", True), ("d1", False)])
def test_an_engine_that_is_restarted_loses_no_request(
    checks: Checks, service: str, drained: bool
) -> None:
    """Also one that the router is not told of: while it drains it answers with nothing."""
    assert checks.restarted(service, drained=drained).ok


def test_prometheus_scrapes_every_service_and_loads_the_alerts(
    running: Fleet, tmp_path: Path
) -> None:
    """Debian's program, with the command and the files of the service in ``compose.yaml``."""
    service = running.stack.services["prometheus"]
    running.add({"prometheus": on_the_base_image(service, programs(tmp_path))})
    url = f"http://{running.address('prometheus')}:9090"

    def up() -> dict[str, str]:
        try:
            targets = asked(url, "targets")["activeTargets"]
        except OSError:  # it is starting
            return {}
        return {one["labels"]["instance"]: one["health"] for one in targets}

    until(lambda: list(up().values()) == ["up"] * 5, "five targets up", 60.0)
    assert set(up()) == {"router:9000", *(f"{name}:8000" for name in running.stack.engines())}
    (group,) = asked(url, "rules")["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert len(group["rules"]) == (running.directory / "alerts.yml").read_text().count("- alert: ")


# Controls


@pytest.fixture(scope="module")
def wrong_pair(running: Fleet, say: Say) -> tuple[str, str]:
    """Two engines whose KV goes over ``serving``; decode changes a byte of all that it reads."""
    running.compose("stop", "p2", "d2")
    services = running.stack.services
    say("starting the pair of the controls")
    running.add(
        {
            "p9": variant(
                services["p1"],
                "172.30.0.49",
                "172.30.1.49",
                {"VLLM_NIXL_SIDE_CHANNEL_HOST": "172.30.0.49"},
                kv_interface="172.30.0.0/24",
            ),
            "d9": variant(
                services["d1"],
                "172.30.0.59",
                "172.30.1.59",
                kv_interface="172.30.0.0/24",
                warm_peers=["172.30.0.49:5600"],
                debug_faults={"seed": 1, "reads": {"corrupt": 1.0}},
            ),
        }
    )
    running.await_healthy("p9", "d9")
    return "p9", "d9"


def test_a_changed_byte_is_seen(running: Fleet, wrong_pair: tuple[str, str]) -> None:
    """The control of every comparison above."""
    prefill, decode, alone = (
        Client(running.url(name), model=MODEL) for name in (*wrong_pair, ALONE)
    )
    prompts = [prompt for prompt in fresh(90, 700, seed=11) if len(prompt) >= 64][:30]
    differ = 0
    for prompt in prompts:
        seen = prefill_then_decode(prefill, decode, prompt, MAX_TOKENS)
        differ += compare(alone.complete(prompt, MAX_TOKENS), seen) is not None
    assert len(prompts) == 30
    assert differ >= 3  # one byte of a read is one of thousands of numbers, and may matter little


def test_kv_on_the_other_network_is_seen(checks: Checks, wrong_pair: tuple[str, str]) -> None:
    """The control of the check of network cards; after the test above, which pulls."""
    prefill, decode = wrong_pair
    assert checks.pulled_nbytes(decode) > 0
    found = checks.kv_elsewhere([prefill], [decode])
    assert any(line.startswith("kv: ") for line in found)
    assert any(line.startswith("serving: ") for line in found)


def test_the_check_of_cards_needs_bytes() -> None:
    quiet = {"kv": Card("eth1", 0, 0), "serving": Card("eth0", 0, 0)}
    assert elsewhere(0.0, {"p": quiet}, {"d": quiet}) == ["nothing was pulled"]
    assert json.dumps(elsewhere(1.0, {"p": quiet}, {"d": quiet})).count("kv: ") == 2
