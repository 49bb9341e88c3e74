"""What a running fleet is asked to keep: right answers, KV on its own network, no lost request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from pdconn.tools.lab.compare_answers import Answer, compare
from pdconn.tools.lab.lab_client import Client
from tests.project.docker.debian import Say
from tests.project.docker.fleet.containers import ALONE, MODEL, Card, Fleet, until
from tests.project.docker.fleet.traffic import MAX_TOKENS, Sent, Traffic, fresh, send

PREFILL, DECODE = ("p1", "p2"), ("d1", "d2")
_CLIENTS = 4
_DRAIN_S = 4.0
"""The router looks at its file every second or so; what it sent before is answered soon."""
_SHARE_BESIDE_KV = 0.25
"""Of pulled bytes, the most that the other card may carry: prompts, answers, events, health."""


@dataclass(frozen=True)
class Step:
    """What became of the requests that were sent while one thing was done to the fleet.

    Attributes:
        cut: their stream, or their connection, was broken when it was allowed to be.
        lost: how the other requests without an answer ended.
        wrong: how answers differ from those of one engine alone.
    """

    name: str
    seconds: float
    num_requests: int
    slowest_s: float
    cut: int = 0
    lost: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    more: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """No wrong answer, and nothing lost."""
        return self.num_requests > 0 and not self.lost and not self.wrong

    def line(self) -> str:
        """For people."""
        said = f"{self.num_requests} requests, {self.cut} cut, slowest {self.slowest_s:.1f} s"
        said += "".join(f", {name} {value:g}" for name, value in self.more.items())
        said += "".join(f"\n    lost: {one}" for one in self.lost[:5])
        said += "".join(f"\n    wrong: {one}" for one in self.wrong[:5])
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name}: {said}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "ok": self.ok}


class Checks:
    """The checks of one fleet, in any order; each leaves it as it was."""

    def __init__(self, fleet: Fleet, say: Say) -> None:
        self.fleet = fleet
        self.steps: list[Step] = []
        self._say = say
        self._alone = Client(fleet.url(ALONE), model=MODEL)
        self._seed = 0

    # What is right

    def differences(self, sent: Iterable[Sent]) -> list[str]:
        """How whole answers differ from those of one engine alone."""
        whole = [(one.prompt, one.answer) for one in sent if one.answer is not None]
        with ThreadPoolExecutor(_CLIENTS) as pool:
            right = pool.map(lambda one: self._alone.complete(one[0], MAX_TOKENS), whole)
            return [
                f"{len(prompt)} tokens: {found}"
                for (prompt, answer), expected in zip(whole, right, strict=True)
                if (found := _compared(expected, answer)) is not None
            ]

    def _judge(
        self,
        name: str,
        began: float,
        sent: Sequence[Sent],
        may_cut: Callable[[Sent], bool] = lambda _: False,
        **more: float,
    ) -> Step:
        seconds = time.monotonic() - began
        failed = [one for one in sent if one.answer is None]
        step = Step(
            name,
            round(seconds, 1),
            len(sent),
            round(max((one.seconds for one in sent), default=0.0), 1),
            sum(may_cut(one) for one in failed),
            tuple(str(one.problem) for one in failed if not may_cut(one)),
            tuple(self.differences(sent)),
            more,
        )
        self.steps.append(step)
        self._say(step.line())
        return step

    def _traffic(self) -> Traffic:
        self._seed += 1
        return Traffic(self.fleet.url("router"), self._seed)

    # Without harm

    def same_answers(self, count: int = 200) -> Step:
        """Answers are those of one engine alone, and most prompts were handed over."""
        prompts = fresh(count, 1500, seed=7)
        before, began = self.pulls(), time.monotonic()
        with ThreadPoolExecutor(_CLIENTS) as pool:
            sent = list(pool.map(lambda prompt: send(self.fleet.url("router"), prompt), prompts))
        return self._judge("same answers", began, sent, pulls=self.pulls() - before)

    def pulls(self, *engines: str) -> float:
        """Prompts that decode engines have pulled since they started."""
        return sum(self._metric(name, "pdconn:pulls_total") for name in engines or DECODE)

    def pulled_nbytes(self, *engines: str) -> float:
        """Card that they have pulled."""
        return sum(
            self._metric(name, "vllm:nixl_bytes_transferred_sum") for name in engines or DECODE
        )

    def _metric(self, service: str, name: str) -> float:
        return Client(self.fleet.url(service), model=MODEL).metrics().get(name, 0.0)

    def kv_elsewhere(
        self, prefill: Sequence[str] = PREFILL, decode: Sequence[str] = DECODE
    ) -> list[str]:
        """What says that KV did not go over the network ``kv`` alone; by what cards counted."""
        return elsewhere(
            self.pulled_nbytes(*decode),
            {name: self.fleet.cards(name) for name in prefill},
            {name: self.fleet.cards(name) for name in decode},
        )

    # With harm

    def killed(self, service: str) -> Step:
        """``docker kill``, and a start 5 s later.

        An answer that a killed decode engine, or the router, had begun is cut.
        """
        began = time.monotonic()
        with self._traffic() as traffic:
            time.sleep(4.0)
            self.fleet.do("kill", service)
            time.sleep(5.0)
            self.fleet.do("start", service)
            self.fleet.await_healthy(service)
            time.sleep(4.0)
        allowed: dict[str, Callable[[Sent], bool]] = {
            **dict.fromkeys(PREFILL, lambda _: False),
            **dict.fromkeys(DECODE, lambda one: one.began),
            "router": lambda one: one.cut,
        }
        return self._judge(f"kill {service}", began, traffic.sent, allowed[service])

    def paused(self, service: str, for_s: float = 12.0) -> Step:
        """``docker pause`` and ``unpause``: a machine that stands still."""
        began = time.monotonic()
        with self._traffic() as traffic:
            time.sleep(2.0)
            self.fleet.do("pause", service)
            time.sleep(for_s)
            self.fleet.do("unpause", service)
            self.fleet.await_healthy(service)
            time.sleep(3.0)
        return self._judge(f"pause {service}", began, traffic.sent)

    def unplugged(self, service: str, for_s: float = 12.0) -> Step:
        """The network ``kv`` is taken from an engine and given back; KV goes over it again.

        Docker may give the card that comes back another name, and UCX keeps to the name with
        which it began: the engine is then restarted, as an operator would have to.
        """
        began = time.monotonic()
        with self._traffic() as traffic:
            time.sleep(3.0)
            card = self.fleet.cards(service)["kv"].name
            self.fleet.unplug(service, "kv")
            time.sleep(for_s)
            self.fleet.plug(service, "kv")
            time.sleep(5.0)
            renamed = self.fleet.cards(service)["kv"].name != card
            if renamed:
                self.fleet.do("restart", service, "--time", "40")
                self.fleet.await_healthy(service)
            before = self._handed_over(service)
            until(lambda: self._handed_over(service) >= before + 3, f"{service} hands over again")
        return self._judge(f"unplug {service}", began, traffic.sent, renamed=float(renamed))

    def _handed_over(self, service: str) -> float:
        """Prompts that a decode engine has pulled, or that are pulled from a prefill engine."""
        if service in DECODE:
            return self.pulls(service)
        return float(self.fleet.cards(service)["kv"].sent // 100_000)

    def restarted(self, service: str, *, drained: bool) -> Step:
        """An engine is restarted, and used again once it is healthy.

        ``drained``: in the router's file, before; else the router learns of it by what it answers.
        """
        began = time.monotonic()
        with self._traffic() as traffic:
            if drained:
                self.fleet.drain(service)
            time.sleep(_DRAIN_S)
            self.fleet.do("restart", service, "--time", "40")
            self.fleet.await_healthy(service)
            if drained:
                self.fleet.drain(service, draining=False)
            before = self._handed_over(service)
            until(lambda: self._handed_over(service) >= before + 1, f"{service} is used")
        return self._judge(f"{'drain and ' * drained}restart {service}", began, traffic.sent)


def elsewhere(
    pulled: float, prefill: dict[str, dict[str, Card]], decode: dict[str, dict[str, Card]]
) -> list[str]:
    """What says that ``pulled`` bytes did not go from prefill to decode over ``kv`` alone."""
    wrong = [] if pulled else ["nothing was pulled"]
    sent = sum(cards["kv"].sent for cards in prefill.values())
    received = sum(cards["kv"].received for cards in decode.values())
    wrong += [f"kv: prefill sent {sent} of {pulled:.0f} bytes"] if sent < pulled else []
    wrong += [f"kv: decode received {received} of {pulled:.0f} bytes"] if received < pulled else []
    for name, carried in (
        ("prefill sent", sum(cards["serving"].sent for cards in prefill.values())),
        ("decode received", sum(cards["serving"].received for cards in decode.values())),
    ):
        if carried > _SHARE_BESIDE_KV * pulled:
            wrong.append(f"serving: {name} {carried} bytes, and {pulled:.0f} were pulled")
    return wrong


def _compared(expected: Answer, answer: Answer | None) -> object | None:
    return None if answer is None else compare(expected, answer)
