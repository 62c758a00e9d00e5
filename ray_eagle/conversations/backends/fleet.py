"""Many requests in flight at several servers, any of which may fail, stall or die. Pure asyncio.

What failed is asked again, after a pause that doubles and is never twice the same. A server that refuses connections or fails
`DRAIN_AFTER` requests in a row is drained: it gets nothing while the others go on, and is looked at again and again until it
answers. Nothing gives up before all servers are down for `wait_s` seconds; what no retry can cure (a wrong key, an unknown model)
ends everything at once.

A request that fails `tries` times is refused alone: a prompt may well kill a server, or take too long. When several are and
nothing else is answered meanwhile, a harmless question (`control`) decides whether the servers are at fault: that ends the run.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import aiohttp

from ray_eagle.conversations.messages import RowError
from ray_eagle.errors import ServingError

DRAIN_AFTER = 5
GIVEN_UP_AT_MOST = 2
PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
LOOK_S, MAX_LOOK_S, LOOK_TIMEOUT_S = 0.5, 10.0, 10.0
FATAL = {
    401: "Set generate.api_key_env to the environment variable that holds the key.",
    403: "Check the key in the environment variable that generate.api_key_env names.",
    404: "Check generate.model, generate.urls and generate.backend.",
    405: "Check generate.urls and generate.backend.",
}
BUSY = frozenset({429, 503})
AGAIN = frozenset({408, 409, 425})

Question_contra = TypeVar("Question_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)
Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Fault(Exception):
    """An answer that cannot be used, though another try may bring a good one."""


class Dialect(Protocol[Question_contra, Answer_co]):
    """What is said to one kind of server."""

    name: str
    path: str
    """Where questions are posted."""
    look: str
    """What a GET shows of a server that works."""

    def seen(self, url: str, payload: Any) -> str:
        """Name of the model by what `look` answered. Raises ServingError for a server of another model, Fault."""

    def body(self, question: Question_contra, model: str) -> dict[str, Any]:
        """What is posted, as JSON."""

    def answer(self, payload: Any) -> Answer_co:
        """Raises Fault for what is not an answer, RowError for a question that has none."""


@dataclass(frozen=True)
class Limits:
    """How much is asked at once, and for how long."""

    in_flight: int
    """Requests at one server at the same time."""
    tries: int
    timeout_s: float
    """For one answer."""
    wait_s: float
    """For any server, when none answers."""


@dataclass
class Server:
    """One server, as it is now."""

    url: str
    up: bool = False
    model: str = ""
    running: int = 0
    failures: int = 0
    """Failed requests since the last good one."""
    last: str = "not asked yet"
    """Its last failure."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """It went down."""


class _Failed(Exception):
    """A try that failed, and who is to blame for it."""

    def __init__(self, message: str, *, kind: str = "failed", after: float = 0.0) -> None:
        super().__init__(message)
        self.kind, self.after = kind, after


class Fleet(Generic[Question, Answer]):
    """The servers; an async context manager. `say` is told when one goes down or comes back."""

    def __init__(
        self,
        dialect: Dialect[Question, Answer],
        urls: list[str],
        limits: Limits,
        *,
        control: Question,
        key: str = "",
        say: Callable[[str], None] = lambda message: None,
        seed: int | None = None,
    ) -> None:
        self.dialect, self.limits, self._control, self._say = dialect, limits, control, say
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._random = random.Random(seed)
        self._fatal: ServingError | None = None
        self._given_up = 0
        self._last_answer = self._down_since = time.monotonic()

    async def __aenter__(self) -> "Fleet[Question, Answer]":
        self._changed = asyncio.Condition()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
        self._last_answer = self._down_since = time.monotonic()
        self._keepers = [asyncio.create_task(self._keep(server)) for server in self.servers]
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._session.close()

    @property
    def capacity(self) -> int:
        """Requests that all servers together take at a time."""
        return self.limits.in_flight * len(self.servers)

    def __str__(self) -> str:
        """For a progress line."""
        up = sum(server.up for server in self.servers)
        running = sum(server.running for server in self.servers)
        return f"{running} in flight, {up} of {len(self.servers)} servers"

    async def ask(self, question: Question) -> Answer:
        """The answer of any server. Raises RowError when this question has none, ServingError when the servers fail."""
        tries = pauses = 0
        busy_since = 0.0
        while True:
            pause = min(MAX_PAUSE_S, PAUSE_S * 2**pauses)
            server = await self._slot()
            try:
                answer = await self._post(server, question)
                self._well(server)
                return answer
            except _Failed as failed:
                server.last = str(failed)
                if failed.kind == "failed":
                    tries += 1
                    server.failures += 1
                elif failed.kind == "busy":
                    busy_since = busy_since or time.monotonic()
                    pause = failed.after or pause
                    if time.monotonic() - max(busy_since, self._last_answer) > self.limits.wait_s:
                        raise await self._end(f"all servers are too busy for {self.limits.wait_s:g} s") from None
                if failed.kind == "gone" or server.failures >= DRAIN_AFTER:
                    self._drain(server)
                if failed.kind == "gone":
                    continue
            finally:
                await self._free(server)
            if tries >= self.limits.tries:
                await self._give_up(server, tries)
            pauses += 1
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))

    # --- one request -----------------------------------------------------------------------------------------------------

    async def _slot(self) -> Server:
        """A place at the server that is up and has the fewest requests. Raises ServingError when there will be none."""
        async with self._changed:
            while True:
                if self._fatal:
                    raise self._fatal
                free = [s for s in self.servers if s.up and s.running < self.limits.in_flight]
                if free:
                    server = min(free, key=lambda s: s.running)
                    server.running += 1
                    return server
                await self._changed.wait()

    async def _free(self, server: Server) -> None:
        server.running -= 1
        await self._wake(1)

    async def _wake(self, waiting: int | None = None) -> None:
        """Those who wait for a slot look again: so many, or all."""
        async with self._changed:
            if waiting is None or self._fatal:
                self._changed.notify_all()
            else:
                self._changed.notify(waiting)

    async def _post(self, server: Server, question: Question) -> Answer:
        timeout = aiohttp.ClientTimeout(total=self.limits.timeout_s, sock_connect=LOOK_TIMEOUT_S)
        body = json.dumps(self.dialect.body(question, server.model)).encode()
        try:
            async with self._session.post(
                server.url + self.dialect.path,
                data=body,
                headers={"Content-Type": "application/json"},
                timeout=timeout,
            ) as response:
                status, after, content = response.status, response.headers.get("Retry-After"), await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _Failed(f"cannot be reached ({_why(error)})", kind="gone") from None
        except TimeoutError:
            raise _Failed(f"no answer within {self.limits.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(f"the connection broke ({type(error).__name__}: {error})") from None
        if status >= 400:
            self._refused(server, status, content, after)
        try:
            return self.dialect.answer(json.loads(content))
        except ValueError:
            raise _Failed(f"broken JSON ({len(content)} bytes: {_shown(content)})") from None
        except Fault as fault:
            raise _Failed(str(fault)) from None
        except RowError:
            self._well(server)
            raise

    def _refused(self, server: Server, status: int, content: bytes, after: str | None) -> None:
        """Raises what a status above 399 means: ServingError, RowError or _Failed."""
        text = f"HTTP {status}: {reason_of(content)}"
        if status in BUSY:
            raise _Failed(text, kind="busy", after=float(after) if after and after.isdigit() else 0.0)
        if status >= 500 or status in AGAIN:
            raise _Failed(text)
        if status in FATAL:
            server.last = text
            self._fatal = ServingError(f"generate: server {server.url}{self.dialect.path}: {text}. {FATAL[status]}")
            raise self._fatal
        self._well(server)  # it works: it does not like this one
        raise RowError(f"refused by the server: {text}")

    def _well(self, server: Server) -> None:
        server.failures = self._given_up = 0
        self._last_answer = time.monotonic()

    async def _give_up(self, server: Server, tries: int) -> None:
        """Raises RowError; ServingError when the servers answer nothing at all."""
        last = f"{server.url}: {server.last}"
        self._given_up += 1
        if self._given_up > GIVEN_UP_AT_MOST and not await self._answers_control():
            raise await self._end(f"{self._given_up} prompts failed {tries} times each, and nothing else is answered")
        raise RowError(f"no answer in {tries} tries, at last: {last}")

    async def _answers_control(self) -> bool:
        server = await self._slot()
        try:
            await self._post(server, self._control)
            self._well(server)
            return True
        except _Failed as failed:
            server.last = str(failed)
            return False
        except RowError:
            return True
        finally:
            await self._free(server)

    async def _end(self, what: str) -> ServingError:
        """Nothing more is asked; the error names each server with its last failure. The first reason stays."""
        servers = "; ".join(f"{s.url}: {s.last}" for s in self.servers)
        self._fatal = self._fatal or ServingError(
            f"generate: {what}. {servers}. Check the servers and generate.urls, then run it again: what was committed is kept."
        )
        await self._wake()
        return self._fatal

    # --- one server ------------------------------------------------------------------------------------------------------

    def _drain(self, server: Server) -> None:
        """Nothing more for this server, until it answers a look."""
        if not server.up:
            return
        server.up = False
        if not any(s.up for s in self.servers):
            self._down_since = time.monotonic()
        server.news.set()
        others = sum(s.up for s in self.servers)
        self._say(f"generate: server {server.url} is drained ({server.last}); {others} of {len(self.servers)} go on")

    async def _keep(self, server: Server) -> None:
        """Look at a server that is down, less and less often, until it answers; wait while it is up."""
        while True:
            first, pause = server.model == "", LOOK_S
            while not await self._looks_well(server):
                none_up = not any(s.up for s in self.servers)
                if none_up and time.monotonic() - self._down_since > self.limits.wait_s:
                    await self._end(f"no server answers for {self.limits.wait_s:g} s (generate.server_wait_s)")
                if self._fatal:
                    await self._wake()
                    return
                if first and pause == LOOK_S:
                    self._say(f"generate: waiting for server {server.url} ({server.last})")
                await asyncio.sleep(min(pause, self.limits.wait_s / 4) * self._random.uniform(0.5, 1.5))
                pause = min(2 * pause, MAX_LOOK_S)
            server.news.clear()
            server.up, server.failures = True, 0
            if not first or pause > LOOK_S:
                self._say(f"generate: server {server.url} is back" if not first else f"generate: {server.url} is there")
            await self._wake()
            await server.news.wait()
            await asyncio.sleep(LOOK_S * self._random.uniform(0.5, 1.5))

    async def _looks_well(self, server: Server) -> bool:
        try:
            async with self._session.get(
                server.url + self.dialect.look,
                timeout=aiohttp.ClientTimeout(total=min(LOOK_TIMEOUT_S, self.limits.timeout_s)),
            ) as response:
                content = await response.read()
                if response.status in FATAL:
                    self._refused(server, response.status, content, None)
                if response.status != 200:
                    server.last = f"{self.dialect.look}: HTTP {response.status}: {reason_of(content)}"
                    return False
            server.model = self.dialect.seen(server.url, json.loads(content) if content.strip() else None)
            return True
        except ServingError as error:
            self._fatal = error
        except TimeoutError:
            server.last = f"{self.dialect.look}: no answer within {min(LOOK_TIMEOUT_S, self.limits.timeout_s):g} s"
        except (aiohttp.ClientError, OSError) as error:
            server.last = f"cannot be reached ({_why(error)})"
        except (ValueError, Fault) as error:
            server.last = f"{self.dialect.look}: not understood ({error})"
        return False


def reason_of(content: bytes) -> str:
    """What a server says went wrong: the message inside OpenAI's and others' error objects, else the text."""
    try:
        found = json.loads(content)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(key):
                found = found[key]
        return found if isinstance(found, str) else json.dumps(found)[:300]
    except ValueError:
        return _shown(content)


def _why(error: Exception) -> str:
    """What the system says; aiohttp adds words about TLS."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _shown(content: bytes) -> str:
    return " ".join(content.decode(errors="replace").split())[:200] or "nothing"
