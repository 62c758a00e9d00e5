"""An engine in a child process: what SGLang and vLLM have in common. What differs is a `Dialect`."""

import json
import math
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import httpx
import torch

from ray_eagle.config import ServeConfig
from ray_eagle.drafter.checkpoint import save_drafter
from ray_eagle.drafter.engines import Engine
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.start import random_drafter
from ray_eagle.errors import EagleError, InputError, ServingError
from ray_eagle.serving.child import Child, free_port
from ray_eagle.serving.engine import EngineFacts, Speculation, Work, check_prompt, starting_speculation
from ray_eagle.serving.generation import Generation
from ray_eagle.serving.passes import NOTHING, Answer, ended, full_batch, step_seconds, verify_passes
from ray_eagle.serving.streams import Reply, post_all
from ray_eagle.serving.supervisor import SCRATCH_PREFIX

ASK_S = 30.0
ROOM_FOR_TWO = 0.45
"""Share of the GPU's memory: two servers of it leave some."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
Get = Callable[[str], str]
"""GET of a path of the server: its body. Raises ServingError."""


@dataclass(frozen=True)
class Models:
    """What a server decodes with; the drafter is known to fit the target."""

    target: Path
    drafter: Path | None
    """A folder that SGLang loads; None: random weights of `shape`."""
    shape: DrafterShape
    layers: int
    """Of the target,"""
    model_type: str
    """and its family: engines read a drafter's layer ids by them."""
    vocab_size: int
    max_positions: int
    seed: int
    ends: frozenset[int] = frozenset()
    """Token ids that end an answer."""
    trust_remote_code: bool = False


class Dialect(Protocol):
    """How one kind of server is started, asked and understood."""

    name: str
    path: str
    """Where it takes requests for tokens."""
    essential: str
    """Pattern of the titles of the processes that it cannot live without."""

    def environment(self, speculation: Speculation | None = None) -> dict[str, str]:
        """Of its process when it decodes so."""

    def command(self, port: int, speculation: Speculation | None, drafter: Path) -> list[str]:
        """Its command line; the host is loopback."""

    def flags(self, speculation: Speculation | None, drafter: str) -> list[str]:
        """The part of it that decides how it drafts."""

    def reads(self) -> Engine:
        """How it reads a drafter's layer ids."""

    def body(self, work: Work) -> dict[str, Any]:
        """The request for one answer."""

    def answer(self, reply: Reply) -> Answer:
        """What came back. Raises InputError for a refused prompt, ServingError for what cannot be understood."""

    def counters(self, get: Get) -> Any:
        """Counters of the whole server, read before and after a batch; None where answers carry their own."""

    def counted(
        self, answers: list[Answer], before: Any, after: Any, *, speculating: bool, undisturbed: bool
    ) -> list[Answer]:
        """The answers with what the counters add. `undisturbed`: no other request was inside meanwhile."""

    def facts(self, get: Get) -> EngineFacts:
        """What the running server says of itself."""


@dataclass(frozen=True)
class Running:
    """A child process and how it decodes."""

    child: Child
    speculation: Speculation | None


class ServerEngine:
    """`Engine` by child processes that speak a dialect: one, or one that speculates and one that does not."""

    def __init__(
        self, dialect: Dialect, config: ServeConfig, models: Models, starting: Speculation | None = None
    ) -> None:
        """Starts the server, speculating so (default: as the settings say). Raises ConfigError, ServingError."""
        self.parallel = config.max_running
        self._dialect, self._config, self._models = dialect, config, models
        self._scratch = tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX)
        self._drafter = as_read(self._drafter_folder(), dialect.reads(), models, Path(self._scratch.name))
        self._side_by_side = both_fit(config)
        self._gate = _Gate()
        self._servers: dict[bool, Running] = {}
        """Those that are up, by whether they speculate."""
        self._current: Running | None = None
        self._failed = ""
        self._closed = False
        try:
            self.configure(starting or starting_speculation(config))
        except BaseException:
            self.close()
            raise

    def configure(self, speculation: Speculation | None) -> None:
        """Restart the server unless one decodes so already. Raises ServingError once it is closed, besides `Engine`'s."""
        with self._gate.alone():
            if self._closed:
                raise ServingError(f"{self._dialect.name}: the server is closed and starts no more.")
            drafts = speculation is not None
            there = self._servers.get(drafts)
            if there and not self._failed and there.speculation == speculation:
                self._current = there
                return
            port, dialect = free_port(), self._dialect
            # first: what it cannot do is refused while the old one runs
            command = dialect.command(port, speculation, self._drafter)
            keep = self._servers.get(not drafts) if self._side_by_side and not self._failed else None
            self._current = None
            try:
                self._stop(all_but=keep)
                environment, scratch = dialect.environment(speculation), self._scratch.name
                child = Child(dialect.name, command, environment, port, dialect.essential, scratch)
                child.await_healthy(self._config.start_s, self._config.hang_s)
            except (EagleError, OSError) as error:
                self._failed = str(error)
                self._stop()
                raise
            self._current = self._servers[drafts] = Running(child, speculation)
            self._failed = ""
        if self._closed:  # meanwhile
            self.close()

    def generate(self, work: Sequence[Work], concurrency: int = 1) -> list[Generation]:
        """In batches of `concurrency`; the next starts when the last answer of one is done."""
        for each in work:
            check_prompt(
                each.input_ids,
                each.max_new_tokens,
                vocabulary=self._models.vocab_size,
                max_positions=self._models.max_positions,
            )
        made: list[Generation] = []
        with self._gate.together(lambda: self._current) as undisturbed:
            for first in range(0, len(work), concurrency):
                made += self._batch(work[first : first + concurrency], concurrency, undisturbed)
        return made

    def facts(self) -> EngineFacts:
        """Asks the server."""
        now = self._running()
        told = self._dialect.facts(self._get)
        drafter = str(self._models.drafter or "random")
        asked = now.speculation and now.speculation.simulated
        return told.model_copy(
            update={
                "server": f"{now.child.mark}, process {now.child.pid}{told.server}",
                "speculation": now.speculation,
                "flags": self._dialect.flags(now.speculation, drafter),
                "max_positions": self._models.max_positions,
                "side_by_side": self._side_by_side,
                "requests": self._gate.entered[now],
                "running": self._gate.inside,
                "simulated": sorted({*([] if asked else told.simulated), *_simulated(self._dialect.environment())}),
            }
        )

    def health(self) -> None:
        """As `/health` of the server: SGLang makes one real token."""
        child = self._running().child
        if not child.healthy():
            raise ServingError(f"{child.name}: /health does not answer.{child.tail()}")

    def check(self) -> None:
        """Whether it can still answer; fine while it is being restarted."""
        if self._failed:
            raise ServingError(self._failed)
        for server in list(self._servers.values()):
            try:
                server.child.check(self._config.hang_s, busy=self._gate.inside > 0)
            except ServingError as error:
                if server not in self._servers.values():  # restarted meanwhile
                    continue
                self._failed = str(error)
                self._stop()  # half a server still holds its memory, and keeps requests waiting
                raise

    def close(self) -> None:
        """Stop the servers and forget the scratch files."""
        self._closed = True
        self._current = None
        self._failed = self._failed or "closed"
        self._stop()
        self._scratch.cleanup()

    def _stop(self, all_but: Running | None = None) -> None:
        for drafts, server in list(self._servers.items()):
            if server is not all_but:
                self._servers.pop(drafts, None)
                server.child.stop()

    def _batch(self, work: Sequence[Work], concurrency: int, undisturbed: Callable[[], bool]) -> list[Generation]:
        now, dialect = self._running(), self._dialect
        child = now.child
        before = dialect.counters(self._get)
        try:
            replies = post_all(child.url + dialect.path, [dialect.body(each) for each in work], self._config.hang_s)
        except TimeoutError:
            self._failed = f"{child.name}: the server hangs: nothing for {self._config.hang_s:g} s (serve.hang_s)."
            raise ServingError(self._failed + child.tail()) from None
        except aiohttp.ClientError as error:
            raise ServingError(f"{child.name}: the server broke off ({error!r}).{child.tail()}") from error
        after = dialect.counters(self._get)
        answers = dialect.counted(
            [
                answer if each.past_end else ended(answer, self._models.ends)
                for each, answer in zip(work, map(dialect.answer, replies), strict=True)
            ],
            before,
            after,
            speculating=now.speculation is not None,
            undisturbed=undisturbed(),
        )
        # a smaller batch is not what was asked for
        window = full_batch(answers) if len(work) == concurrency else NOTHING
        return [_generation(each, answer, now.speculation, window) for each, answer in zip(work, answers, strict=True)]

    def _running(self) -> Running:
        now = self._current
        if now is None:
            raise ServingError(self._failed or f"{self._dialect.name}: the server is being restarted. Ask again later.")
        return now

    def _get(self, path: str) -> str:
        child = self._running().child
        try:
            response = httpx.get(child.url + path, timeout=ASK_S)
        except httpx.HTTPError as error:
            raise ServingError(f"{child.name}: {path} does not answer ({error!r}).{child.tail()}") from error
        if response.status_code != 200:
            raise ServingError(f"{child.name}: {path} answered {response.status_code}: {response.text[:300]}")
        return response.text

    def _drafter_folder(self) -> Path:
        models = self._models
        if models.drafter:
            return models.drafter
        folder = Path(self._scratch.name) / "random"
        dtype = torch.float16 if self._config.dtype == "float16" else torch.bfloat16
        save_drafter(random_drafter(models.shape, models.seed), folder, dtype)
        return folder


def _generation(work: Work, answer: Answer, chosen: Speculation | None, window: tuple[float, float]) -> Generation:
    passes = verify_passes(answer, len(work.input_ids), chosen.steps) if chosen else []
    return Generation(
        tokens=answer.tokens,
        passes=passes,
        finish_reason="stop" if answer.stopped else "length",
        prefill_seconds=answer.times[0] - answer.started,
        decode_seconds=answer.times[-1] - answer.times[0],
        decode_tokens=len(answer.tokens) - 1,
        step_seconds=step_seconds(answer, len(passes) if chosen else None, window),
        gaps=answer.gaps or [],
    )


def as_read(folder: Path, engine: Engine, models: Models, scratch: Path) -> Path:
    """The drafter's folder, or one in `scratch` with the same files whose layer ids this engine takes for its layers."""
    ids = engine.ids_for(list(models.shape.aux_layers), models.layers, models.model_type)
    config = json.loads((folder / "config.json").read_text())
    nested = config.get("eagle_config")
    if (nested or config).get(LAYER_IDS) == ids:
        return folder
    copy = scratch / "with-layer-ids"
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json":
            (copy / path.name).symlink_to(path.absolute())
    config[LAYER_IDS] = ids
    if isinstance(nested, dict):
        config["eagle_config"] = {**nested, LAYER_IDS: ids}
    (copy / "config.json").write_text(json.dumps(config, indent=2))
    return copy


def child_environment(config: ServeConfig) -> dict[str, str]:
    """The replica's, with `serve.env` on top, $NAME replaced."""
    return {**os.environ, **{name: os.path.expandvars(value) for name, value in config.env.items()}}


def both_fit(config: ServeConfig) -> bool:
    """Whether a server without speculation stays up beside the one that speculates."""
    share = config.memory_share
    return config.side_by_side if config.side_by_side is not None else share is not None and share <= ROOM_FOR_TWO


def tensor_parallel(config: ServeConfig) -> int:
    """GPUs that one copy of the target is spread over."""
    return max(1, math.ceil(config.gpus))


def read_event(name: str, payload: bytes) -> dict[str, Any]:
    """One JSON object of a stream, or the reason in it why there is none. Raises InputError, ServingError."""
    try:
        value = json.loads(payload)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServingError(f"{name}: expected a JSON object in the answer, found {payload[:200]!r}.")
    if "error" in value:
        error = value["error"]
        message = error.get("message", error) if isinstance(error, dict) else error
        code = error.get("code") if isinstance(error, dict) else None
        raise (InputError if code in (400, "400") else ServingError)(f"{name}: {message}")
    return value


def _simulated(environment: dict[str, str]) -> list[str]:
    """Variables that make SGLang pretend to accept drafts. -1 turns them off."""
    return [
        f"{name}={value}"
        for name, value in environment.items()
        if name.startswith("SGLANG_SIMULATE_ACC_LEN") and value.strip() not in ("", "-1", "-1.0")
    ]


class _Gate:
    """Requests pass together; a restart waits until none is inside, and lets none in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self.inside = 0
        self.entered: Counter[Hashable] = Counter()
        """Ever, by what they came for."""

    @contextmanager
    def together(self, what: Callable[[], Hashable] = lambda: None) -> Iterator[Callable[[], bool]]:
        """Yields the question whether nobody else has been inside so far. `what`: asked once inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self.inside += 1
            self.entered[what()] += 1
            first, number = self.inside == 1, self.entered.total()
        try:
            yield lambda: first and self.entered.total() == number
        finally:
            with self._changed:
                self.inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            self._changed.wait_for(lambda: self.inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
