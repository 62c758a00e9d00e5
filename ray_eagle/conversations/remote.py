"""Batches answered by servers: one event loop in the driver, as many conversations at a time as the servers take.

Conversations begin in the order of the batches, and a batch is committed when its last one is over, whichever server answered.
Needs no Ray and no weights: the target's tokenizer and config are all that is read here.
"""

import asyncio
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray_eagle.config import GenerateConfig
from ray_eagle.conversations.backends.dialects import (
    OpenAI,
    RayEagle,
    Sampling,
    SGLang,
    TextAnswer,
    TextQuestion,
    TokenAnswer,
    TokenQuestion,
)
from ray_eagle.conversations.backends.fleet import Fleet, Limits
from ray_eagle.conversations.batches import Batch, commit
from ray_eagle.conversations.chat import Made, TextChat, TokenChat
from ray_eagle.conversations.mask import Renderer
from ray_eagle.conversations.messages import RowError
from ray_eagle.conversations.prompts import Prompt
from ray_eagle.conversations.template import begins_to_reason, render_prompt, stop_ids
from ray_eagle.errors import ConfigError, EagleError
from ray_eagle.progress import Progress, Rate
from ray_eagle.run import Folder
from ray_eagle.target.loading import TargetFacts

NOTE_EVERY_S = 1.0
HARMLESS = "Say yes."
UNWRITTEN = 2
"""Batches that are answered but not committed, above which nothing more is asked: a kill would lose them."""


def answer_batches(
    waiting: list[Batch],
    settings: GenerateConfig,
    facts: TargetFacts,
    tokenizer: Any,
    seed: int,
    folder: Folder,
    progress: Progress,
) -> None:
    """Commit every batch. Raises ServingError when the servers fail, ConfigError without the key that is named."""
    kind = _InText if settings.backend == "openai" else _InTokens
    asyncio.run(kind(settings, facts, tokenizer, seed, folder, progress).run(waiting))


def api_key(settings: GenerateConfig) -> str:
    """The key that servers are shown; empty for none. Raises ConfigError when the variable is not set."""
    name = settings.api_key_env
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise ConfigError(
            f"generate.api_key_env names the environment variable {name}, which is not set here. Set it where this stage runs (in "
            "a job: its runtime environment), or leave the setting out."
        )
    return key


class _Answering:
    """The loop over batches; what a conversation is made of is its subclasses' business."""

    def __init__(
        self,
        settings: GenerateConfig,
        facts: TargetFacts,
        tokenizer: Any,
        seed: int,
        folder: Folder,
        progress: Progress,
    ) -> None:
        self.settings, self.facts, self.tokenizer, self.seed = settings, facts, tokenizer, seed
        self.folder, self.progress = folder, progress
        self.stops = stop_ids(facts.path, tokenizer)
        self.sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_p)
        self.rate = Rate(1)
        self.fleet: Fleet[Any, Any] = Fleet(
            self.dialect(),
            list(settings.urls),
            Limits(settings.in_flight, settings.tries, settings.timeout_s, settings.server_wait_s),
            control=self.control(),
            key=api_key(settings),
            say=progress.say,
        )

    def dialect(self) -> Any:
        raise NotImplementedError

    def control(self) -> Any:
        """A question that every server can answer."""
        raise NotImplementedError

    async def talk(self, prompt: Prompt) -> Any:
        """Ask turn by turn."""
        raise NotImplementedError

    def made(self, talk: Any) -> Made:
        """Rows of a conversation that is over; called outside the event loop."""
        raise NotImplementedError

    async def run(self, waiting: list[Batch]) -> None:
        try:
            with ThreadPoolExecutor(1) as writer:  # one: a tokenizer is not for two threads
                self.writer = writer
                async with self.fleet, asyncio.TaskGroup() as group:
                    ticker = group.create_task(self._tick())
                    await self._all(waiting)
                    ticker.cancel()
        except BaseExceptionGroup as errors:
            explained, _ = errors.split(EagleError)
            raise _first(explained or errors) from None

    async def _all(self, waiting: list[Batch]) -> None:
        room = asyncio.Semaphore(self.fleet.capacity)
        self.unwritten, self.caught_up = 0, asyncio.Event()
        self.caught_up.set()

        async def one(prompt: Prompt) -> Any:
            try:
                return await self.talk(prompt)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for batch in waiting:
                talks = []
                for prompt in batch.prompts:
                    await self.caught_up.wait()
                    await room.acquire()
                    talks.append(group.create_task(one(prompt)))
                group.create_task(self._commit(batch, talks))

    async def _commit(self, batch: Batch, talks: list[asyncio.Task[Any]]) -> None:
        over = await asyncio.gather(*talks)
        self._count_unwritten(1)
        await asyncio.get_running_loop().run_in_executor(self.writer, self._write, batch, over)
        self._count_unwritten(-1)
        self.progress.advance(len(batch.prompts), self._note())

    def _count_unwritten(self, more: int) -> None:
        self.unwritten += more
        (self.caught_up.clear if self.unwritten > UNWRITTEN else self.caught_up.set)()

    def _write(self, batch: Batch, over: list[Any]) -> None:
        made = [self.made(talk) for talk in over]
        rows = [row for kept, _ in made for row in kept]
        commit(self.folder, batch.index, rows, [row for _, rejected in made for row in rejected])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            self.progress.advance(0, self._note())

    def _note(self) -> str:
        return f"{self.rate.per_second:,.0f} tok/s, {self.fleet}"

    def seed_of(self, prompt: Prompt, turn: int) -> int:
        """31 bits, by seed, prompt and turn alone."""
        text = f"{self.seed} {prompt.id} {turn}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


class _InTokens(_Answering):
    """Ids in, ids out."""

    def dialect(self) -> Any:
        if self.settings.backend == "sglang":
            return SGLang(self.sampling, self.stops, self.facts.vocab_size)
        return RayEagle(self.sampling, self.facts.fingerprint, self.facts.vocab_size)

    def control(self) -> TokenQuestion:
        return TokenQuestion(render_prompt(self.tokenizer, HARMLESS), 0)

    async def talk(self, prompt: Prompt) -> TokenChat:
        chat = TokenChat(
            prompt, self.settings, self.tokenizer, frozenset(self.stops), self.facts.max_position_embeddings
        )
        for turn in range(len(prompt.turns)):
            ids = chat.ask(turn)
            if ids is None:
                break
            try:
                answer: TokenAnswer = await self.fleet.ask(TokenQuestion(ids, self.seed_of(prompt, turn)))
            except RowError as error:
                chat.end(turn, str(error))
                break
            self.rate.advance(len(answer.ids))
            chat.add(turn, ids, answer.ids, answer.finish)
        return chat

    def made(self, talk: TokenChat) -> Made:
        return talk.made()


class _InText(_Answering):
    """Messages in, text out; the same path as that of kept answers makes the ids, unless the server returns them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.renderer = Renderer(self.tokenizer, self.stops, self.settings.reasoning_marks)
        self.begun = begins_to_reason(self.tokenizer, self.settings.reasoning_marks[0])
        self.other_length = ""

    def dialect(self) -> OpenAI:
        return OpenAI(self.sampling, self.settings.model, self.facts.vocab_size)

    def control(self) -> TextQuestion:
        return TextQuestion([{"role": "user", "content": HARMLESS}], 0)

    async def talk(self, prompt: Prompt) -> TextChat:
        chat = TextChat(prompt, self.settings, self.begun)
        for turn in range(len(prompt.turns)):
            messages = chat.ask(turn)
            if messages is None:
                break
            try:
                answer: TextAnswer = await self.fleet.ask(TextQuestion(messages, self.seed_of(prompt, turn)))
                chat.add(turn, messages, answer)
            except RowError as error:
                chat.end(turn, str(error))
                break
            self.rate.advance(answer.tokens)
        return chat

    def made(self, talk: TextChat) -> Made:
        self._compare_length(talk)
        return talk.made(self.renderer, frozenset(self.stops), self.facts.max_position_embeddings)

    def _compare_length(self, talk: TextChat) -> None:
        """Tell once when the server fed its model another number of tokens than the target's template gives here."""
        theirs = talk.answers[0].prompt_tokens if talk.answers else None
        if self.other_length or theirs is None:
            return
        ours = len(render_prompt(self.tokenizer, talk.prompt.turns[0], talk.prompt.system))
        if ours != theirs:
            self.other_length = (
                f"generate: warning: the server counts {theirs} tokens in the prompt {talk.prompt.id}, the target's "
                f"chat template gives {ours}. It renders another template (a system text, reasoning switched off?), so the "
                "conversations are not what its model read: compare both templates."
            )
            self.progress.say(self.other_length)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
