"""Many streaming requests at once, with the arrival time of every event. Nothing is parsed until all of them are done.

aiohttp (which Ray brings along) rather than httpx: at 16 streams and thousands of events a second, parsing must not
delay the clock.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Reply:
    """What came back for one request."""

    started: float
    status: int
    events: list[tuple[float, bytes]]
    """Arrival time and payload: of each server-sent event, or of the whole body when it was no stream."""


def post_all(url: str, bodies: Sequence[dict[str, Any]], silent_s: float) -> list[Reply]:
    """POST all of these at the same time. Raises aiohttp.ClientError or TimeoutError (nothing for `silent_s`)."""
    return asyncio.run(_post_all(url, bodies, silent_s))


async def _post_all(url: str, bodies: Sequence[dict[str, Any]], silent_s: float) -> list[Reply]:
    limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silent_s)
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.ensure_future(_post(session, url, json.dumps(body).encode())) for body in bodies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> Reply:
    started = time.perf_counter()
    events: list[tuple[float, bytes]] = []
    rest = b""
    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
        streaming = response.headers.get("Content-Type", "").startswith("text/event-stream")
        async for piece in response.content.iter_any():
            now = time.perf_counter()
            rest += piece
            while streaming and b"\n" in rest:
                line, rest = rest.split(b"\n", 1)
                payload = line.strip().removeprefix(b"data:").strip()
                if payload and payload != b"[DONE]":
                    events.append((now, payload))
        if rest.strip():
            events.append((time.perf_counter(), rest.strip()))
        return Reply(started, response.status, events)
