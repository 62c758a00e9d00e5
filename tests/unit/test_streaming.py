"""Lines to a client that may leave at any moment."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ray_eagle.serving.events import Emit, Progressed
from ray_eagle.serving.streaming import streamed


@pytest.mark.parametrize("lines_sent", [-1, 0, 3])
def test_the_work_ends_when_its_client_leaves_even_before_the_answer_begins(lines_sent: int) -> None:
    ended = threading.Event()

    def work(emit: Emit) -> None:
        try:
            for number in range(10_000):
                emit(Progressed(done=number, total=10_000, note=""))
                ended.wait(0.002)
        finally:
            ended.set()

    async def serve() -> None:
        with ThreadPoolExecutor(1) as pool:
            response = await streamed(pool, work)
            sent: list[Any] = []

            async def send(message: Any) -> None:
                if len(sent) > lines_sent:  # the first message holds the headers; -1: not even they
                    raise OSError("the client is gone")
                sent.append(message)

            async def receive() -> Any:
                await asyncio.sleep(60)
                return {"type": "http.disconnect"}

            with contextlib.suppress(OSError):
                await response({"type": "http", "asgi": {"spec_version": "2.0"}}, receive, send)
            assert await asyncio.to_thread(ended.wait, 5), "the work goes on for nobody"
            assert len(sent) <= lines_sent + 1

    asyncio.run(serve())
