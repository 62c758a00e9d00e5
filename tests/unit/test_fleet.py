"""Many requests at servers that fail: real HTTP, each server as wicked as its test needs."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from ray_eagle.conversations.backends import fleet as module
from ray_eagle.conversations.backends.fleet import DRAIN_AFTER, Fault, Fleet, Limits
from ray_eagle.conversations.messages import RowError
from ray_eagle.errors import ServingError

CONTROL = 1000
LIMITS = Limits(in_flight=4, tries=4, timeout_s=0.5, wait_s=5)
Handler = Callable[[int], Awaitable[web.Response]]


class Echo:
    """A question is a number, and so is its answer."""

    name, path, look = "echo", "/ask", "/look"

    def seen(self, url: str, payload: Any) -> str:
        return "echo"

    def body(self, question: int, model: str) -> dict[str, Any]:
        return {"number": question, "model": model}

    def answer(self, payload: Any) -> int:
        if "number" not in payload:
            raise Fault("no number")
        return payload["number"]


class Server:
    """`answer(number)` decides; `well` is what a look sees."""

    def __init__(self, answer: Handler | None = None) -> None:
        self.handler = answer or echo
        self.well = True
        self.asked: list[int] = []
        self.times: list[float] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most = 0

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/ask", self._ask)
        app.router.add_get("/look", self._look)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _look(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if self.well else 503)

    async def _ask(self, request: web.Request) -> web.Response:
        number = (await request.json())["number"]
        self.asked.append(number)
        self.times.append(time.monotonic())
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.request = request
            return await self.handler(number)
        finally:
            self.running -= 1


async def echo(number: int) -> web.Response:
    await asyncio.sleep(0.005)
    return web.json_response({"number": number})


async def broken(number: int) -> web.Response:
    return web.json_response({"error": {"message": "out of order"}}, status=500)


def in_turn(*replies: Any) -> Handler:
    """One after the other, then echoes."""
    left = list(replies)

    async def handler(number: int) -> web.Response:
        if not left:
            return await echo(number)
        reply = left.pop(0)
        return await reply() if callable(reply) else reply

    return handler


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(module, "LOOK_S", 0.03)


def run(
    servers: list[Server], questions: list[int], limits: Limits = LIMITS, urls: tuple[str, ...] = (), **more: Any
) -> tuple[list[Any], list[str], Fleet[int, int]]:
    """What became of each question (the exception, if one), what was said, and the fleet."""

    async def all_of_them() -> Any:
        said: list[str] = []
        places = [await server.start() for server in servers]
        try:
            async with Fleet(
                Echo(), [*places, *urls], limits, control=CONTROL, say=said.append, seed=0, **more
            ) as fleet:
                found = await asyncio.gather(*(fleet.ask(q) for q in questions), return_exceptions=True)
                return found, said, fleet
        finally:
            for server in servers:
                await server.runner.cleanup()

    return asyncio.run(asyncio.wait_for(all_of_them(), 30))


def test_whatever_may_pass_is_asked_again() -> None:
    server = Server()

    async def reset() -> web.Response:
        assert server.request.transport
        server.request.transport.close()
        return web.Response()

    async def stall() -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    bad = [
        web.Response(status=500, text="oops"),
        web.Response(status=502),
        web.Response(status=408),
        web.Response(text='{"number": 1'),
        web.Response(text='{"other": 1}'),
        web.Response(body=b"\xff\xfe"),
        web.Response(text=""),
        reset,
        stall,
    ]
    for reply in bad:
        server.handler = in_turn(reply)
        server.asked.clear()
        found, _, _ = run([server], [7])
        assert found == [7] and server.asked == [7, 7], reply


def test_pauses_double_and_differ() -> None:
    server = Server(in_turn(*(web.Response(status=500) for _ in range(4))))
    run([server], [1], Limits(4, 9, 5, 5))
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(gaps) == 4
    for k, gap in enumerate(gaps):
        assert 0.5 * 0.01 * 2**k <= gap < 1.5 * 0.01 * 2**k + 0.3
    shares = [gap / 2**k for k, gap in enumerate(gaps)]
    assert max(shares) > 1.05 * min(shares), "no two servers or prompts come back at the same moment"


def test_a_busy_server_is_left_alone_as_long_as_it_asks() -> None:
    server = Server(in_turn(web.Response(status=429, headers={"Retry-After": "1"})))
    found, said, _ = run([server], [1])
    assert found == [1] and server.times[1] - server.times[0] > 0.45
    assert not said, "it works, so it is not drained"


def test_busy_tries_are_not_counted_but_do_not_last_forever() -> None:
    server = Server(in_turn(*(web.Response(status=429) for _ in range(2 * LIMITS.tries))))
    assert run([server], [1])[0] == [1]

    async def always(number: int) -> web.Response:
        return web.Response(status=429, text="later")

    (error,), _, _ = run([Server(always)], [1], Limits(4, 3, 1, 0.2))
    assert isinstance(error, ServingError) and "all servers are too busy for 0.2 s" in str(error)
    assert "HTTP 429: later" in str(error)


def test_no_server_gets_more_than_its_share_and_all_work() -> None:
    servers = [Server(), Server(), Server()]
    found, _, fleet = run(servers, list(range(90)))
    assert found == list(range(90))
    assert [server.most for server in servers] == [4, 4, 4]
    assert sorted(q for server in servers for q in server.asked) == list(range(90))
    assert str(fleet) == "0 in flight, 3 of 3 servers" and fleet.capacity == 12


def test_a_failing_server_is_drained_while_the_others_go_on_and_taken_back_when_it_is_well() -> None:
    bad, good = Server(), Server()

    async def failing(number: int) -> web.Response:
        bad.well = len(bad.asked) < DRAIN_AFTER
        return await broken(number)

    bad.handler = failing

    async def heal() -> None:
        while bad.well:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        asked_while_down = len(bad.asked)
        await asyncio.sleep(0.2)
        assert len(bad.asked) == asked_while_down
        bad.well, bad.handler = True, echo

    async def trial() -> None:
        said: list[str] = []
        urls = [await bad.start(), await good.start()]
        async with Fleet(Echo(), urls, LIMITS, control=CONTROL, say=said.append, seed=0) as fleet:
            healing = asyncio.create_task(heal())
            answered, number = [], 0
            states = set()
            while not healing.done() or not (said and said[-1].endswith("is back")):
                answered += await asyncio.gather(*(fleet.ask(number + i) for i in range(8)))
                number += 8
                states.add(str(fleet))
            before = len(bad.asked)
            answered += await asyncio.gather(*(fleet.ask(number + i) for i in range(20)))
            assert answered == list(range(number + 20)) and len(bad.asked) > before
            assert "0 in flight, 1 of 2 servers" in states
            assert said[0] == f"generate: server {urls[0]} is drained (HTTP 500: out of order); 1 of 2 go on"
            await healing
        for server in (bad, good):
            await server.runner.cleanup()

    asyncio.run(asyncio.wait_for(trial(), 20))


def test_a_server_that_is_not_there_costs_nothing() -> None:
    server = Server()
    found, said, _ = run([server], list(range(40)), urls=("http://127.0.0.1:9",))
    assert found == list(range(40)) and sorted(server.asked) == list(range(40))
    assert any(line.startswith("generate: waiting for server http://127.0.0.1:9 (cannot be reached") for line in said)


def test_when_all_are_dead_one_error_names_each_with_its_last_failure() -> None:
    sick = Server()
    sick.well = False
    began = time.monotonic()
    found, _, fleet = run([sick], [1, 2, 3], Limits(4, 3, 1, 0.5), urls=("http://127.0.0.1:9",))
    assert 0.4 < time.monotonic() - began < 5
    texts = {str(error) for error in found}
    assert len(texts) == 1 and all(isinstance(error, ServingError) for error in found)
    (text,) = texts
    assert text.startswith("generate: no server answers for 0.5 s (generate.server_wait_s). ")
    assert f"{fleet.servers[0].url}: /look: HTTP 503: {{}}" in text
    assert "http://127.0.0.1:9: cannot be reached (" in text and "run it again" in text


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (401, {"error": "no key"}, "HTTP 401: no key. Set generate.api_key_env"),
        (403, {"detail": "not you"}, "HTTP 403: not you. Check the key"),
        (
            404,
            {"error": {"message": "The model `x` does not exist."}},
            "HTTP 404: The model `x` does not exist.. Check",
        ),
    ],
)
def test_what_no_retry_cures_ends_everything_at_once(status: int, body: Any, text: str) -> None:
    async def refusing(number: int) -> web.Response:
        return web.json_response(body, status=status)

    server = Server(refusing)
    (error,), _, _ = run([server], [1])
    assert isinstance(error, ServingError) and text in str(error) and len(server.asked) == 1


def test_a_key_that_is_refused_at_the_first_look_is_told_at_once_and_a_good_one_is_shown() -> None:
    server = Server()

    async def look(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "bad key"}}, status=401)

    server._look = look  # type: ignore[method-assign]
    (error,), _, _ = run([server], [1])
    assert isinstance(error, ServingError) and "HTTP 401: bad key" in str(error) and not server.asked
    server = Server()
    assert run([server], [1], key="s3cret")[0] == [1]
    assert server.headers[0]["Authorization"] == "Bearer s3cret"


def test_a_request_that_is_refused_is_the_rows_fault_alone() -> None:
    async def picky(number: int) -> web.Response:
        if number == 3:
            return web.json_response({"object": "error", "message": "too long"}, status=400)
        return await echo(number)

    server = Server(picky)
    found, said, _ = run([server], list(range(8)))
    assert isinstance(found[3], RowError) and str(found[3]) == "refused by the server: HTTP 400: too long"
    assert [*found[:3], *found[4:]] == [0, 1, 2, 4, 5, 6, 7]
    assert server.asked.count(3) == 1 and not said


def test_a_prompt_that_always_fails_is_given_up_alone() -> None:
    async def poisoned(number: int) -> web.Response:
        return await (broken if number == 5 else echo)(number)

    server = Server(poisoned)
    found, _, _ = run([server], list(range(30)))
    assert server.asked.count(5) == LIMITS.tries
    assert isinstance(found[5], RowError)
    assert str(found[5]).startswith("no answer in 4 tries, at last: http://127.0.0.1:")
    assert str(found[5]).endswith(": HTTP 500: out of order")
    assert [f for i, f in enumerate(found) if i != 5] == [i for i in range(30) if i != 5]


def test_servers_that_fail_everything_end_the_run_not_every_prompt() -> None:
    found, _, _ = run([Server(broken)], list(range(20)))
    given_up = [error for error in found if isinstance(error, RowError)]
    ended = [error for error in found if isinstance(error, ServingError)]
    assert len(given_up) <= 2 and len(given_up) + len(ended) == 20
    assert re.search(r"^generate: \d+ prompts failed 4 times each, and nothing else is answered\. ", str(ended[0]))
    assert "HTTP 500: out of order" in str(ended[0])


def test_many_prompts_that_always_fail_are_given_up_while_the_servers_answer_a_harmless_one() -> None:
    async def poisoned(number: int) -> web.Response:
        return await (broken if number < 7 else echo)(number)

    server = Server(poisoned)
    found, _, _ = run([server], list(range(7)), Limits(1, 3, 1, 5))  # nothing else is left to be answered
    assert all(isinstance(error, RowError) for error in found)
    assert [server.asked.count(number) for number in range(7)] == [3] * 7 and CONTROL in server.asked


@pytest.mark.parametrize("seed", range(4))
def test_under_random_faults_each_question_gets_its_own_answer(seed: int) -> None:
    import random

    rng = random.Random(seed)

    async def random_faults(number: int) -> web.Response:
        await asyncio.sleep(rng.random() * 0.01)
        chance = rng.random()
        if chance < 0.1:
            return web.Response(status=rng.choice([500, 502, 503, 429]))
        if chance < 0.15:
            return web.Response(text=json.dumps({"number": number})[: rng.randrange(12)])
        if chance < 0.16:
            await asyncio.sleep(60)
        return await echo(number)

    servers = [Server(random_faults) for _ in range(3)]
    found, _, _ = run(servers, list(range(300)), Limits(8, 12, 0.5, 5))
    assert found == list(range(300))
    assert sum(len(server.asked) for server in servers) > 310
