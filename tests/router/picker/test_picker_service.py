"""Where a picker sends requests, and what it makes of a gateway's word, behind a real Envoy."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from pdconn.router.picker import picker_service
from pdconn.router.picker.endpoints import Endpoints
from pdconn.router.routing.routed_request import RoutedRequest
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, FakeEngine
from tests.router.picker.gateway import MODES, Filter, behind_envoy


def by_name(engine: FakeEngine) -> str:
    return engine.url.replace("127.0.0.1", "localhost")


@pytest.mark.parametrize("has_next", [True, False])
@in_loop
async def test_an_address_that_the_gateway_does_not_know_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, has_next: bool
) -> None:
    """The control: with one address that it does not know, the gateway chooses by itself."""

    async def look_up(host: str, port: int) -> Iterable[str]:
        return ("127.0.0.9", "127.0.0.1") if has_next else ("127.0.0.9",)

    monkeypatch.setattr(picker_service, "Endpoints", partial(Endpoints, look_up))
    async with deployment(num_decode=2, word=by_name, running=behind_envoy(Filter())) as d:
        for _ in range(6):
            reply = await d.complete()
            assert (reply.status, reply.body) == (200, ANSWER)
        answered = [len(engine.seen) for engine in d.decode]
        assert (answered == [3, 3]) is has_next


@pytest.mark.parametrize("settings", [{}, {"streams": "on"}, {"policy": "prefix"}])
@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_only_endpoints_that_the_gateway_allows_are_picked(
    mode: str, settings: dict[str, str]
) -> None:
    shape = Filter(mode, subset=lambda endpoints: ["nonsense", endpoints[1]])
    async with deployment(num_decode=3, running=behind_envoy(shape), **settings) as d:
        for number in range(6):
            reply = await d.complete(prompt=f"{number}")
            assert (reply.status, reply.headers["X-Pdconn-Engine"]) == (200, d.decode[1].url)
        await d.send("/v1/embeddings", b'{"input": "x"}')
        await d.send("/v1/responses/r1", method="GET")
        await d.complete("/v1/responses", previous_response_id="r1")
        assert len(d.decode[1].others) >= 2
        for other in (d.decode[0], d.decode[2]):
            assert (other.seen, other.others) == ([], [])
        assert d.decode[1].seen[0].params["do_remote_prefill"]


@pytest.mark.parametrize(
    "subset",
    [
        [],
        ["10.6.6.6:1"],
        ["nonsense"],
        {},
        7,
        True,
        None,
        "",
        [["127.0.0.1:1"]],
        [7, None],
    ],
    ids=repr,
)
@in_loop
async def test_a_gateway_that_allows_nothing_gets_503_and_no_engine_is_asked(
    subset: object,
) -> None:
    running = behind_envoy(Filter(subset=lambda endpoints: subset))
    async with deployment(running=running) as d:
        assert (await d.complete()).status == 503
        assert d.outcome("no_engine") == 1
        assert not any(engine.seen for engine in (*d.prefill, *d.decode))


@in_loop
async def test_an_engine_that_is_allowed_and_down_is_replaced_by_no_other() -> None:
    shape = Filter(subset=lambda endpoints: [endpoints[0]])
    async with deployment(num_decode=2, running=behind_envoy(shape)) as d:
        assert (await d.complete()).status == 200
        await d.decode[0].stop()
        d.proxy.router.engines.mark_down(d.decode[0].url, "stopped")
        assert (await d.complete()).status == 503
        assert (d.decode[1].seen, len(d.prefill[0].seen)) == ([], 1)


@in_loop
async def test_the_final_check_of_endpoints_holds_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the choice does not heed the gateway's list."""
    monkeypatch.setattr(RoutedRequest, "may_serve", lambda self, role: self.serving)
    shape = Filter(subset=lambda endpoints: [endpoints[0]])
    async with deployment(num_decode=2, running=behind_envoy(shape)) as d:
        for _ in range(4):  # another is named beside it
            assert (await d.complete()).status == 200
        assert not any(seen.params.get("do_remote_prefill") for seen in d.decode[1].seen)
        assert len(d.decode[0].seen) == 4


@pytest.mark.parametrize("mode", MODES)
@in_loop
async def test_a_request_that_the_picker_fails_at_is_not_sent_on_unchecked(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the gateway fails open: else whoever finds a defect gets past every check."""
    async with deployment(running=behind_envoy(Filter(mode, fails_open=True))) as d:
        with monkeypatch.context() as defect:
            defect.setattr("pdconn.router.front.client_api.parse_body", None)
            reply = await d.complete()
        assert (reply.status, reply.error["type"]) == (500, "InternalServerError")
        assert not any(engine.seen for engine in (*d.prefill, *d.decode))
        assert len([one for one in caplog.records if one.exc_info]) == 1
        await until(lambda: d.metric("inflight_requests") == 0)
        assert (await d.complete()).status == 200  # the control


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
@in_loop
async def test_probes_have_the_methods_that_the_proxys_have(path: str) -> None:
    async with deployment() as by_proxy, deployment(running=behind_envoy(Filter())) as by_picker:
        for method in ("GET", "HEAD", "POST"):
            wanted, got = [await d.send(path, method=method) for d in (by_proxy, by_picker)]
            assert (got.status, got.headers.get("Allow")) == (
                wanted.status,
                wanted.headers.get("Allow"),
            )
        assert (got.status, got.body) == (405, wanted.body)


@in_loop
async def test_without_the_gateways_word_all_engines_are_picked() -> None:
    """The control: Envoy forwards the list only if it is configured to."""
    silent = {"metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}}}
    shape = Filter(subset=lambda endpoints: [endpoints[0]], more=silent)
    async with deployment(num_decode=2, running=behind_envoy(shape)) as d:
        for _ in range(4):
            assert (await d.complete()).status == 200
        assert [len(engine.seen) for engine in d.decode] == [2, 2]
