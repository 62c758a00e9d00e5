"""What one replica does, without Ray: one engine, one request at a time."""

import os
import platform
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

import ray_eagle
from ray_eagle.config import ServeConfig, TargetConfig
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.errors import InputError
from ray_eagle.probing.probe import ProbePrompt, ProbeReport, run_probe
from ray_eagle.serving.messages import GenerateReply, GenerateRequest, Health, Info, ProbeRequest, PromptSource
from ray_eagle.serving.reference import load_engine
from ray_eagle.target.loading import load_tokenizer


class Replica:
    """Answers the four requests. Not thread-safe: the caller sends one request at a time (except `info`)."""

    def __init__(
        self,
        target: TargetConfig,
        serve: ServeConfig,
        drafter_folder: Path | None,
        random_shape: DrafterShape | None,
        seed: int,
        on_reply: Callable[[GenerateReply], None] = lambda reply: None,
    ) -> None:
        """Loads both models; raises as `load_engine`. `on_reply` sees every answer, those of a probe included."""
        self._engine, self._facts, self._shape = load_engine(target, serve, drafter_folder, random_shape, seed)
        self._tokenizer = load_tokenizer(self._facts, target)
        self._on_reply = on_reply
        self._engine_name = serve.engine
        self._drafter = str(drafter_folder or "random")

    def generate(self, request: GenerateRequest) -> GenerateReply:
        """Raises InputError for a prompt that cannot be tokenized, is empty or too long."""
        return self._answer(self._tokens(request), request.max_new_tokens, request.steps, request.plain)

    def probe(self, request: ProbeRequest) -> ProbeReport:
        """The probe report over the request's prompts. Raises InputError as `run_probe`."""
        prompts = [
            ProbePrompt(id=item.id, category=item.category, input_ids=self._tokens(item)) for item in request.prompts
        ]
        return run_probe(
            _Local(self._answer),
            prompts,
            steps=request.steps,
            max_new_tokens=request.max_new_tokens,
            plain_prompts=request.plain_prompts,
            confidence=request.confidence,
            resamples=request.resamples,
            seed=request.seed,
        )

    def info(self) -> Info:
        parameter = next(self._engine.model.parameters())
        packages = {name: version(name) for name in ("ray", "torch", "transformers")}
        return Info(
            engine=self._engine_name,
            target=str(self._facts.path),
            target_fingerprint=self._facts.fingerprint,
            drafter=self._drafter,
            shape=self._shape,
            dtype=str(parameter.dtype).removeprefix("torch."),
            device=str(parameter.device),
            threads=torch.get_num_threads(),
            max_positions=self._engine.max_positions,
            versions={"ray_eagle": ray_eagle.__version__, "python": platform.python_version(), **packages},
            node=socket.gethostname(),
            pid=os.getpid(),
        )

    def health(self) -> Health:
        """Make one real token."""
        started = time.perf_counter()
        self._engine.plain([0], 1)
        return Health(ok=True, seconds=time.perf_counter() - started)

    def _answer(self, input_ids: list[int], max_new_tokens: int, steps: int, plain: bool) -> GenerateReply:
        engine = self._engine
        made = engine.plain(input_ids, max_new_tokens) if plain else engine.speculate(input_ids, max_new_tokens, steps)
        text = self._tokenizer.decode(made.tokens, skip_special_tokens=True)
        reply = GenerateReply(text=text, prompt_length=len(input_ids), **vars(made))
        self._on_reply(reply)
        return reply

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


class _Local:
    """The `probe.Client` of an engine in the same process."""

    def __init__(self, answer: Callable[[list[int], int, int, bool], GenerateReply]) -> None:
        self._answer = answer

    def generate(self, *, input_ids: list[int], max_new_tokens: int, steps: int, plain: bool) -> GenerateReply:
        return self._answer(input_ids, max_new_tokens, steps, plain)
