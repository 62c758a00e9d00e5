"""The reference engine: target and drafter in one process, batch 1, greedy chain speculation, written for clarity.

Prefill gives the first token. Then cycles: the drafter takes in the positions that the target has newly computed and
drafts K tokens; one target forward over [newest token, d1 .. dK] verifies them; the longest prefix that equals the
target's own argmax is kept, and the target's token after it (the bonus) comes free. In float32 the text equals plain
greedy decoding. A cycle is whole (take in, draft, verify), so cycle times compare with plain decode steps.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from ray_eagle.config import ServeConfig, TargetConfig
from ray_eagle.drafter.checkpoint import check_fits, load_drafter
from ray_eagle.drafter.model import Drafter
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.drafter.start import random_drafter
from ray_eagle.errors import ConfigError, TargetError, explain
from ray_eagle.serving.chain import DrafterChain, Drafting
from ray_eagle.serving.engine import EngineFacts, Speculation, Work, check_prompt, need_one_drafter
from ray_eagle.serving.generation import Generation, VerifyPass
from ray_eagle.target.cache import cache_argument
from ray_eagle.target.generation import eos_ids
from ray_eagle.target.loading import TargetFacts, load_tokenizer, read_facts, take_device
from ray_eagle.target.stage import load_model

Listener = Callable[[VerifyPass, float], None]
"""Called with each pass and its seconds; what it raises ends the answer."""


class ReferenceEngine:
    """Greedy decoding of a transformers causal LM, plain or with a drafter. Not thread-safe."""

    parallel = 1

    def __init__(self, model: Any, eos_ids: Sequence[int], drafter: Drafter | Drafting | None = None) -> None:
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.max_positions: int = model.config.get_text_config().max_position_embeddings
        self._embedding = model.get_input_embeddings()
        self._device = self._embedding.weight.device
        self._cache_argument = cache_argument(model)
        self.speculation: Speculation | None = None
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._chain: Drafting | None = None
        if drafter is not None:
            self.set_drafter(drafter)

    def set_drafter(self, drafter: Drafter | Drafting) -> None:
        """Draft with this one from now on; its `aux_layers` decide which states are captured."""
        self._chain = DrafterChain(drafter, self._embedding) if isinstance(drafter, Drafter) else drafter
        for hook in self._hooks:
            hook.remove()
        layers = self.model.get_decoder().layers
        self._hooks = [layers[i].register_forward_hook(self._capture(i)) for i in self._chain.aux_layers]

    def configure(self, speculation: Speculation | None) -> None:
        """How `generate` decodes. Raises ConfigError for what it cannot do, and without a drafter."""
        if speculation and (speculation.topk > 1 or speculation.draft_tokens != speculation.steps + 1):
            raise ConfigError(
                f"reference engine: expected a chain (topk 1, draft_tokens = steps + 1), found {speculation.name}. Use "
                "serve.engine sglang for trees."
            )
        if speculation and speculation.simulated:
            raise ConfigError("reference engine: expected no simulated acceptance, which only the sglang engine has.")
        if speculation and self._chain is None:
            raise ConfigError("speculative decoding: expected a drafter, found no drafter.")
        self.speculation = speculation

    def generate(self, work: Sequence[Work], concurrency: int = 1) -> list[Generation]:
        """One after the other, greedily. Raises ConfigError for more at once, or for sampling."""
        if concurrency > 1 or any(each.temperature > 0 for each in work):
            raise ConfigError(
                f"reference engine: expected greedy decoding of one prompt at a time, found {concurrency} at once"
                f"{', sampled' if any(each.temperature > 0 for each in work) else ''}. Use serve.engine sglang."
            )
        if any(each.past_end for each in work):
            raise ConfigError("reference engine: expected answers that stop at their end, found past_end.")
        chosen = self.speculation
        if chosen is None:
            return [self.plain(each.input_ids, each.max_new_tokens, gaps=each.gaps) for each in work]
        return [self.speculate(each.input_ids, each.max_new_tokens, chosen.steps) for each in work]

    def facts(self) -> EngineFacts:
        return EngineFacts(
            name="reference",
            version=version("transformers"),
            server=str(os.getpid()),
            speculation=self.speculation,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self._device),
            max_positions=self.max_positions,
            side_by_side=True,
        )

    def health(self) -> None:
        """Make one real token."""
        self.plain([0], 1)

    def check(self) -> None:
        """It lives as long as its process."""

    def close(self) -> None:
        """It ends with its process."""

    @torch.inference_mode()
    def plain(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, gaps: bool = False, listen: Listener | None = None
    ) -> Generation:
        """One token a target forward; `listen` hears of each as a pass without drafts.

        Raises InputError for a prompt that is empty or too long.
        """
        self._check(prompt_ids, max_new_tokens)
        clock = _Clock(self._device)
        cache = DynamicCache()
        logits_TV = self._logits(list(prompt_ids), cache, keep=1)
        tokens, apart = [int(logits_TV[-1].argmax())], [self._gap(logits_TV[-1])] if gaps else []
        prefill_seconds = clock.lap()
        clock.tell(listen, VerifyPass(len(prompt_ids) - 2, [], 0, tokens[0]), prefill_seconds)
        laps: list[float] = []
        while self._unfinished(tokens, max_new_tokens):
            logits_TV = self._logits(tokens[-1:], cache)
            tokens.append(int(logits_TV[-1].argmax()))
            if gaps:
                apart.append(self._gap(logits_TV[-1]))
            laps.append(clock.lap())
            clock.tell(listen, VerifyPass(len(prompt_ids) + len(tokens) - 3, [], 0, tokens[-1]), laps[-1])
        made = self._generation(tokens, [], max_new_tokens, prefill_seconds, laps)
        return replace(made, gaps=apart[: len(made.tokens)])

    @torch.inference_mode()
    def speculate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, steps: int, *, listen: Listener | None = None
    ) -> Generation:
        """`steps` draft tokens a cycle (fewer only where the target's context ends). `listen` hears of each pass as it is
        made, and first of the prefill's token, as a pass without drafts; its own time is not counted.

        Raises InputError for a prompt that is empty or too long, ConfigError without a drafter or for steps < 1.
        """
        self._check(prompt_ids, max_new_tokens)
        chain = self._chain
        if chain is None or steps < 1:
            found = "no drafter" if chain is None else f"steps = {steps}"
            raise ConfigError(f"speculative decoding: expected a drafter and at least one draft step, found {found}.")
        clock = _Clock(self._device)
        cache = DynamicCache()
        chain.reset()
        sequence = list(prompt_ids)
        sequence += self._forward(sequence, cache, keep=1)
        first = len(prompt_ids)
        aux_TC = self._aux()
        if first > 1:  # all but the newest position, which belongs to the first cycle
            chain.extend(aux_TC[:-1], sequence[1:first])
        aux_TC = aux_TC[-1:]
        prefill_seconds = clock.lap()
        clock.tell(listen, VerifyPass(first - 2, [], 0, sequence[-1]), prefill_seconds)
        passes: list[VerifyPass] = []
        laps: list[float] = []
        while self._unfinished(sequence[first:], max_new_tokens):
            start = len(sequence) - 2
            chain.extend(aux_TC, sequence[-len(aux_TC) :])
            drafted = chain.draft(min(steps, self.max_positions - len(sequence)))
            verified = self._forward([sequence[-1], *drafted], cache)
            accepted = _agreeing(drafted, verified)
            if accepted < len(drafted):
                cache.crop(accepted - len(drafted))
            aux_TC = self._aux()[: accepted + 1]
            passes.append(VerifyPass(start, drafted, accepted, verified[accepted]))
            sequence += verified[: accepted + 1]
            laps.append(clock.lap())
            clock.tell(listen, passes[-1], laps[-1])
        return self._generation(sequence[first:], passes, max_new_tokens, prefill_seconds, laps)

    def _forward(self, tokens: list[int], cache: DynamicCache, keep: int = 0) -> list[int]:
        """The target's argmax after each token (after the last `keep` only); appends to the cache, captures states."""
        return self._logits(tokens, cache, keep).argmax(-1).tolist()

    def _logits(self, tokens: list[int], cache: DynamicCache, keep: int = 0) -> Tensor:
        """[T, V], or [keep, V]."""
        input_ids = torch.tensor([tokens], device=self._device)
        arguments = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": keep}
        return self.model(input_ids=input_ids, **arguments).logits[0]

    def _capture(self, layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def _aux(self) -> Tensor:
        """[T, 3H]: the captured layer outputs of the last forward, side by side."""
        assert self._chain is not None
        return torch.cat([self._captured[layer][0] for layer in self._chain.aux_layers], dim=-1)

    def _unfinished(self, answer: list[int], max_new_tokens: int) -> bool:
        return len(answer) < max_new_tokens and self.eos_ids.isdisjoint(answer)

    def _generation(
        self,
        answer: list[int],
        passes: list[VerifyPass],
        max_new_tokens: int,
        prefill_seconds: float,
        laps: list[float],
    ) -> Generation:
        ends = [i for i, token in enumerate(answer[:max_new_tokens]) if token in self.eos_ids]
        tokens = answer[: ends[0] + 1] if ends else answer[:max_new_tokens]
        reason: Literal["stop", "length"] = "stop" if ends else "length"
        typical = statistics.median(laps) if laps else 0.0
        return Generation(tokens, passes, reason, prefill_seconds, sum(laps), len(tokens) - 1, typical)

    def _check(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        check_prompt(
            prompt_ids, max_new_tokens, vocabulary=self._embedding.num_embeddings, max_positions=self.max_positions
        )

    def _gap(self, logits_V: Tensor) -> float:
        """How far apart the two best tokens are in log-probability."""
        first, second = logits_V.float().log_softmax(-1).topk(2).values.tolist()
        return first - second


def load_engine(
    target_config: TargetConfig,
    serve_config: ServeConfig,
    drafter_folder: Path | None,
    random_shape: DrafterShape | None,
    seed: int,
) -> tuple[ReferenceEngine, TargetFacts, DrafterShape]:
    """The engine with the drafter of a folder, or a random one of a shape; the target's facts; the drafter's shape.

    Raises TargetError, CheckpointError (a damaged drafter, or one made for another target), ConfigError unless exactly
    one drafter is given.
    """
    need_one_drafter(drafter_folder, random_shape, "reference")
    device = take_device(serve_config.cpus, serve_config.gpus)
    facts = read_facts(target_config)
    model = load_model(facts, target_config, device, serve_config.dtype if serve_config.dtype != "auto" else "")
    if drafter_folder is not None:
        drafter = load_drafter(drafter_folder)
    else:
        assert random_shape is not None
        drafter = random_drafter(random_shape, seed)
    check_fits(
        drafter.shape,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        layers=facts.layers,
        where=drafter_folder or "random drafter",
    )
    ends = _eos_ids(model, facts, target_config)
    engine = ReferenceEngine(model, ends, drafter.to(device, model.dtype).eval())
    engine.configure(Speculation(steps=serve_config.steps))
    return engine, facts, drafter.shape


def _eos_ids(model: Any, facts: TargetFacts, config: TargetConfig) -> list[int]:
    """As `generate` ends answers. Raises TargetError when nothing does."""
    ids = eos_ids(model, load_tokenizer(facts, config))
    if not ids:
        raise TargetError(
            explain(
                "end of sequence",
                where=facts.path,
                expected="eos_token_id in generation_config.json or the tokenizer",
                found="none",
                fix="Add it: without one no answer ends.",
            )
        )
    return ids


def _agreeing(drafted: list[int], verified: list[int]) -> int:
    """Length of the longest prefix of the drafts that the target would have said itself."""
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == verified[accepted]:
        accepted += 1
    return accepted


class _Clock:
    """Wall time between laps, in seconds; work queued on a GPU counts in the lap that queued it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark = time.perf_counter()

    def lap(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        before, self._mark = self._mark, time.perf_counter()
        return self._mark - before

    def tell(self, listen: Listener | None, made: VerifyPass, seconds: float) -> None:
        """What a listener does with a pass belongs to no lap."""
        if listen:
            listen(made, seconds)
            self.lap()
