"""What one replica does, without Ray: one engine, one request at a time."""

import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import ray_eagle
from ray_eagle.config import ServeConfig, TargetConfig
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.errors import InputError
from ray_eagle.probing.probe import ProbePrompt, ProbeReport, Progress
from ray_eagle.probing.sweep import probe_with
from ray_eagle.serving.engine import EngineFacts, Speculation, Work
from ray_eagle.serving.engines import load_engine
from ray_eagle.serving.events import Emit, Narrator, Replied, Started
from ray_eagle.serving.generation import Generation, VerifyPass
from ray_eagle.serving.messages import (
    ConfigureRequest,
    DecodeReply,
    DecodeRequest,
    GenerateReply,
    GenerateRequest,
    Health,
    Info,
    ProbeRequest,
    PromptSource,
)
from ray_eagle.serving.reference import Listener, ReferenceEngine
from ray_eagle.target.loading import load_tokenizer


class Replica:
    """Answers requests. As thread-safe as its engine: the caller sends `parallel` at a time (except `info` and `check`)."""

    def __init__(
        self,
        target: TargetConfig,
        serve: ServeConfig,
        drafter_folder: Path | None,
        random_shape: DrafterShape | None,
        seed: int,
        starting: Speculation | None = None,
        on_reply: Callable[[GenerateReply], None] = lambda reply: None,
    ) -> None:
        """Loads both models; raises as `load_engine`. `on_reply` sees every answer that is no pretence, those of a probe included."""
        self._engine, self._facts, self._shape = load_engine(
            target, serve, drafter_folder, random_shape, seed, starting
        )
        self._tokenizer = load_tokenizer(self._facts, target)
        self._on_reply = on_reply
        self._pretends = bool(starting and starting.simulated)
        self._serve = serve
        self._drafter = str(drafter_folder or "random")

    def generate(self, request: GenerateRequest) -> GenerateReply:
        """Raises InputError for a prompt that cannot be tokenized, is empty or too long, and for another way to decode than
        the engine can switch to for one request."""
        tokens = self._tokens(request)
        if isinstance(self._engine, ReferenceEngine):
            return self.one(tokens, request.max_new_tokens, _steps(request, self._engine))
        now = self._engine.facts().speculation
        if now and now.simulated:
            raise InputError(
                f"generate: expected a server that decodes in earnest, found one that pretends that each cycle yields "
                f"{now.simulated:g} tokens, to time cycles: its text would mean nothing. POST /configure first."
            )
        wanted = None if request.plain else now if request.steps is None else Speculation(steps=request.steps)
        if wanted != now or (now is None and not request.plain):
            raise InputError(
                f"generate: the {self._serve.engine} server decodes {now.name if now else 'without speculation'} and would "
                "have to restart for anything else. Leave steps and plain out, or POST /configure first."
            )
        return self._replies([tokens], self._engine.generate([Work(tokens, request.max_new_tokens)]))[0]

    def stream(self, request: GenerateRequest, emit: Emit) -> None:
        """`generate` as lines, pass by pass where the engine is in this process. Raises as `generate`, and what `emit` does."""
        tokens, engine = self._tokens(request), self._engine
        if isinstance(engine, ReferenceEngine):
            narrator = Narrator(self._tokenizer, tokens, request.max_new_tokens, engine.eos_ids)
            begun = False

            def listen(made: VerifyPass, seconds: float) -> None:
                nonlocal begun
                if not begun:  # not before the engine took the prompt: until then an error is an answer of its own
                    emit(Started(prompt_length=len(tokens), live=True))
                    begun = True
                emit(narrator.tell(made, seconds))

            emit(Replied(reply=self.one(tokens, request.max_new_tokens, _steps(request, engine), listen)))
            return
        reply = self.generate(request)
        narrator = Narrator(self._tokenizer, tokens, len(reply.tokens))
        emit(Started(prompt_length=len(tokens), live=False))
        emit(narrator.tell(VerifyPass(len(tokens) - 2, [], 0, reply.tokens[0]), reply.prefill_seconds))
        passes = reply.passes or [VerifyPass(-1, [], 0, token) for token in reply.tokens[1:]]
        for made in passes:
            emit(narrator.tell(made, reply.decode_seconds / len(passes)))
        emit(Replied(reply=reply))

    def one(
        self, input_ids: list[int], max_new_tokens: int, steps: int | None, listen: Listener | None = None
    ) -> GenerateReply:
        """One answer of the reference engine, which switches between both ways for free. steps: None decodes plainly."""
        engine = self._engine
        assert isinstance(engine, ReferenceEngine)
        if steps is None:
            made = engine.plain(input_ids, max_new_tokens, listen=listen)
        else:
            made = engine.speculate(input_ids, max_new_tokens, steps, listen=listen)
        return self._replies([input_ids], [made])[0]

    def configure(self, request: ConfigureRequest) -> EngineFacts:
        """Raises ConfigError for what the engine cannot do, ServingError when its server does not restart."""
        self._engine.configure(request.speculation)
        self._pretends = bool(request.speculation and request.speculation.simulated)
        return self._engine.facts()

    def decode(self, request: DecodeRequest) -> DecodeReply:
        """Raises as `Engine.generate`."""
        work = [
            Work(ids, request.max_new_tokens, request.temperature, gaps=request.gaps, past_end=request.past_end)
            for ids in request.prompts
        ]
        made = self._engine.generate(work, request.concurrency)
        return DecodeReply(replies=self._replies(request.prompts, made))

    def engine(self) -> EngineFacts:
        return self._engine.facts()

    def probe(self, request: ProbeRequest, progress: Progress = lambda done, total, note: None) -> ProbeReport:
        """The probe report over the request's prompts. Raises as `probe_with`."""
        prompts = [
            ProbePrompt(id=item.id, category=item.category, input_ids=self._tokens(item)) for item in request.prompts
        ]
        chosen = Speculation(steps=request.steps, topk=request.topk, draft_tokens=request.draft_tokens or 0)
        return probe_with(
            _Local(self),
            prompts,
            engine=self._serve.engine,
            settings=[chosen, *request.sweep],
            concurrencies=request.concurrencies,
            temperature=request.temperature,
            outlived=True,
            max_new_tokens=request.max_new_tokens,
            plain_prompts=request.plain_prompts,
            confidence=request.confidence,
            resamples=request.resamples,
            seed=request.seed,
            progress=progress,
        )

    def info(self) -> Info:
        facts = self._engine.facts()
        packages = {name: version(name) for name in ("ray", "torch", "transformers")}
        if facts.version and facts.name != "reference":
            packages[facts.name] = facts.version
        return Info(
            engine=self._serve.engine,
            target=str(self._facts.path),
            target_fingerprint=self._facts.fingerprint,
            drafter=self._drafter,
            shape=self._shape,
            dtype=facts.dtype,
            device=facts.device,
            threads=torch.get_num_threads(),
            max_positions=facts.max_positions,
            versions={"ray_eagle": ray_eagle.__version__, "python": platform.python_version(), **packages},
            node=socket.gethostname(),
            pid=os.getpid(),
        )

    def health(self) -> Health:
        """Make one real token."""
        started = time.perf_counter()
        self._engine.health()
        return Health(ok=True, seconds=time.perf_counter() - started)

    def check(self) -> None:
        """Raises ServingError when the engine can never answer again."""
        self._engine.check()

    def close(self) -> None:
        """End what the engine started."""
        self._engine.close()

    def _replies(self, prompts: Sequence[list[int]], made: Sequence[Generation]) -> list[GenerateReply]:
        replies = []
        for ids, each in zip(prompts, made, strict=True):
            text = self._tokenizer.decode(each.tokens, skip_special_tokens=True)
            replies.append(GenerateReply(text=text, prompt_length=len(ids), **vars(each)))
            if not self._pretends:
                self._on_reply(replies[-1])
        return replies

    def _tokens(self, source: PromptSource) -> list[int]:
        if source.input_ids is not None:
            return source.input_ids
        if source.text is not None:
            return self._tokenizer(source.text).input_ids
        turns = [turn.model_dump() for turn in source.messages or ()]
        try:
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template raises whatever its author chose
            raise InputError(
                f"messages: the target's chat template refuses them ({error}). Send turns that it allows."
            ) from None
        return self._tokenizer(text, add_special_tokens=False).input_ids


def _steps(request: GenerateRequest, engine: ReferenceEngine) -> int | None:
    """What the request asks for, else what the engine is configured to do; None without speculation."""
    if request.plain:
        return None
    return request.steps or (engine.speculation.steps if engine.speculation else None)


class _Local:
    """The probe's client of a replica in the same process."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def generate(self, *, input_ids: list[int], max_new_tokens: int, steps: int, plain: bool) -> GenerateReply:
        return self._replica.one(input_ids, max_new_tokens, None if plain else steps)

    def configure(self, speculation: Speculation | None) -> EngineFacts:
        return self._replica.configure(ConfigureRequest(speculation=speculation))

    def engine(self) -> EngineFacts:
        return self._replica.engine()

    def decode(self, **request: Any) -> list[GenerateReply]:
        return self._replica.decode(DecodeRequest.model_validate(request)).replies
