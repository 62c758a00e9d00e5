"""Lines from an engine's thread to a client that reads them as they come, and a stop for the engine when it leaves."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ray_eagle.errors import EagleError
from ray_eagle.serving.events import NDJSON, Emit, Failed, Line

logger = logging.getLogger(__name__)
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Nothing on the way may hold lines back."""


class _ClientLeft(Exception):
    """Raised in the work, at its next line."""


class _Lines(StreamingResponse):
    """Says that the client left however the answer ends, also before its first line is asked for."""

    def __init__(self, body: AsyncIterator[bytes], left: threading.Event) -> None:
        super().__init__(body, media_type=NDJSON, headers=HEADERS)
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left.set()


async def streamed(executor: Executor, work: Callable[[Emit], None]) -> StreamingResponse:
    """Run `work` in the executor and answer with its lines.

    An EagleError before the first line is raised here, so that it gets a status of its own; a later one is the last line.
    """
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[Line | EagleError | None] = asyncio.Queue()
    left = threading.Event()

    def put(line: Line | EagleError | None) -> None:
        loop.call_soon_threadsafe(lines.put_nowait, line)

    def emit(line: Line) -> None:
        if left.is_set():
            raise _ClientLeft
        put(line)

    def run() -> None:
        try:
            if not left.is_set():  # it may have left while others were served
                work(emit)
        except _ClientLeft:
            pass
        except EagleError as error:
            put(error)
        except Exception as error:
            logger.exception("a streamed request failed")
            put(Failed(error=f"server: unexpected {type(error).__name__}: {error}"))
        finally:
            put(None)

    loop.run_in_executor(executor, run)
    try:
        first = await lines.get()
    except asyncio.CancelledError:
        left.set()
        raise
    if isinstance(first, EagleError):
        raise first

    async def body() -> AsyncIterator[bytes]:
        line: Line | EagleError | None = first
        while line is not None:
            said = Failed(error=str(line)) if isinstance(line, EagleError) else line
            yield said.model_dump_json().encode() + b"\n"
            line = await lines.get()

    return _Lines(body(), left)
