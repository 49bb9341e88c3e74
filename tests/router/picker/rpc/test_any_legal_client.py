"""Whatever a gateway may do by HTTP/2's rules, each call that it does not break off is answered."""

from __future__ import annotations

import random
from collections import defaultdict

import h2.events
import pytest
from h2.settings import SettingCodes

from tests.fakes.event_loop import in_loop, until
from tests.router.picker.rpc.servers import listening
from tests.router.picker.rpc.test_calls import echo
from tests.router.picker.rpc.test_gateway_connection import RawClient, framed, raw_client

# A server that frames nothing for ever grows by 50 MB a second.
pytestmark = pytest.mark.timeout(60)

NUM_STEPS = 150
MOST_OPEN = 20
WINDOWS = (0, 1, 100, 20_000, 65_535, 200_000)


class FreeClient:
    """Does what the rules allow, at random; knows what each call must be answered.

    Attributes:
        asked: by stream, all bytes that are to be echoed; of calls that were not broken off.
    """

    def __init__(self, client: RawClient, dice: random.Random) -> None:
        self.asked: dict[int, bytes] = {}
        self._client, self._dice = client, dice
        self._unsent: dict[int, bytes] = {}

    async def act(self) -> None:
        """Do one thing."""
        acts = (self._begin, self._send, self._send, self._give_room, self._set, self._break_off)
        self._dice.choice(acts)()
        if self._dice.random() < 0.3:
            await self._client.round_trip()

    async def finish(self) -> None:
        """Send the rest, with room for all answers."""
        self._client.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        await self._client.round_trip()
        self._client.http.increment_flow_control_window(1 << 24)
        while self._unsent:
            for stream in tuple(self._unsent):
                self._send_some(stream, 1 << 20)
            await self._client.round_trip()

    def _begin(self) -> None:
        if len(self._unsent) < MOST_OPEN:
            stream = self._client.begin("Echo")
            dice = self._dice
            sizes = [dice.choice((0, 1, 5, 1000, 70_000)) for _ in range(dice.randint(1, 3))]
            self.asked[stream] = b"".join(framed(dice.randbytes(nbytes)) for nbytes in sizes)
            self._unsent[stream] = self.asked[stream]

    def _send(self) -> None:
        if self._unsent:
            self._send_some(self._dice.choice(list(self._unsent)), self._dice.randint(0, 30_000))

    def _send_some(self, stream: int, most: int) -> None:
        unsent = self._unsent[stream]
        sent = self._client.send_all(stream, unsent[:most])
        self._unsent[stream] = unsent[sent:]
        if not self._unsent[stream]:
            self._client.http.end_stream(stream)
            del self._unsent[stream]

    def _give_room(self) -> None:
        stream = self._dice.choice([None, *self._unsent])
        self._client.http.increment_flow_control_window(self._dice.randint(1, 50_000), stream)

    def _set(self) -> None:
        values = {
            SettingCodes.INITIAL_WINDOW_SIZE: self._dice.choice(WINDOWS),
            SettingCodes.MAX_FRAME_SIZE: self._dice.choice((1 << 14, 1 << 20)),
        }
        code = self._dice.choice(list(values))
        self._client.http.update_settings({code: values[code]})

    def _break_off(self) -> None:
        if self._unsent and self._dice.random() < 0.3:
            stream = self._dice.choice(list(self._unsent))
            self._client.http.reset_stream(stream)
            del self._unsent[stream], self.asked[stream]


@pytest.mark.parametrize("seed", range(12))
@in_loop
async def test_each_call_that_goes_on_is_answered_in_full(seed: int) -> None:
    async with listening({"Echo": echo}) as (server, port), raw_client(port) as client:
        free = FreeClient(client, random.Random(seed))
        for _ in range(NUM_STEPS):
            await free.act()
        await free.finish()
        answers: dict[int, bytes] = defaultdict(bytes)
        ended: set[int] = set()
        seen = 0
        for _ in range(200):
            for event in client.events[seen:]:
                if isinstance(event, h2.events.DataReceived):
                    answers[event.stream_id] += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    ended.add(event.stream_id)
            seen = len(client.events)
            if free.asked.keys() <= ended:
                break
            await client.round_trip()
        assert len(free.asked) > 5
        assert {one: answers[one] for one in free.asked} == free.asked
        [connection] = server._connections
        await until(lambda: connection.num_calls == 0)
