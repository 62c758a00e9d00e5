"""The embedded generator: decoding in slots, each of which takes the next prompt when its answer is done.

transformers' `generate` decodes a batch until its longest answer ends, at the width of its longest prompt. Here a finished
row's place in the cache goes to a waiting prompt, so that every step decodes for nearly all slots.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ray_eagle.target.cache import GrowingLayer, cache_argument, growing_cache

SHARE = 8
"""A prefill waits until one slot in so many is free: it reads all weights, for however few prompts."""

UNUSED = 4
"""The cache drops its first columns once one in so many belongs to no answer: attention reads them all."""


@dataclass(frozen=True)
class Answer:
    """What the target wrote: token ids exactly as generated, end-of-turn token included."""

    ids: list[int]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One answer to write."""

    ids: list[int]
    """The prompt."""
    owner: Any = None
    """Whatever the caller knows it by."""
    seed: str = ""
    """Sampled text depends on this and the prompt alone, to rounding."""


@dataclass
class _Row:
    """A slot's answer while it is written."""

    request: Request
    begin: int
    """Column of the prompt's first token."""
    draw: random.Random
    made: list[int] = field(default_factory=list)
    done: bool = False


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer: the generation config's, and the tokenizer's end of sequence."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


class Decoder:
    """Decodes requests in `slots` rows, greedily at temperature 0, else from the nucleus `top_p`."""

    def __init__(
        self,
        model: Any,
        *,
        eos: list[int],
        slots: int,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> None:
        self.model, self.eos, self.slots = model, frozenset(eos), slots
        self.max_new_tokens, self.temperature, self.top_p = max_new_tokens, temperature, top_p

    @torch.inference_mode()
    def run(self, waiting: deque[Request]) -> Iterator[tuple[Request, Answer]]:
        """Each request with its answer, in the order in which they end. More may be appended to `waiting` meanwhile."""
        batch = _Batch(self)
        while waiting or batch.live:
            free = self.slots - batch.live
            if waiting and batch.open and (not batch.live or free >= max(1, self.slots // SHARE)):
                batch.admit([waiting.popleft() for _ in range(min(free, len(waiting)))])
            else:
                batch.step(thin=not waiting)
            for row in batch.finished():
                ended = row.made[-1] in self.eos
                yield row.request, Answer(row.made, "stop" if ended else "length")

    def choose(self, logits_RV: Tensor, rows: list[_Row]) -> list[int]:
        """The next token of each row."""
        if not self.temperature:
            return logits_RV.argmax(-1).tolist()
        p_RV, order_RV = (logits_RV.float() / self.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        before_RV = p_RV.cumsum(-1) - p_RV
        p_RV = torch.where(before_RV < self.top_p, p_RV, 0.0)  # the token that crosses top_p belongs to the nucleus
        total_RV = p_RV.double().cumsum(-1)
        # [0, 1) in double precision: in single it may round to 1, beyond the nucleus
        drawn = torch.tensor([row.draw.random() for row in rows], dtype=torch.float64, device=p_RV.device)
        place_R1 = torch.searchsorted(total_RV, drawn[:, None] * total_RV[:, -1:], right=True)
        return order_RV.gather(-1, place_R1.clamp(max=p_RV.shape[-1] - 1))[:, 0].tolist()


class _Batch:
    """The rows that are decoded together, and their cache. All end at column `end`."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.device = decoder, decoder.model.device
        self.cache_argument = cache_argument(decoder.model)
        self.rows: list[_Row] = []
        self.cache: Any = None
        self.end = 0
        self.waiting_tokens: list[int] = []
        """The newest token of each row, which the model has not seen."""

    @property
    def live(self) -> int:
        return sum(not row.done for row in self.rows)

    @property
    def open(self) -> bool:
        """Whether prompts may join. A cache with layers that are not ours takes in nobody until all are done."""
        return not self.live or all(isinstance(layer, GrowingLayer) for layer in self.cache.layers)

    def admit(self, requests: list[Request]) -> None:
        """Prefill the prompts, left-padded to the longest, into rows that are done and new ones."""
        if not self.live:
            self.rows, self.cache, self.end, self.waiting_tokens = [], None, 0, []
        width = max(len(request.ids) for request in requests)
        ids_NT = torch.zeros(len(requests), width, dtype=torch.int64)
        for i, request in enumerate(requests):
            ids_NT[i, width - len(request.ids) :] = torch.tensor(request.ids)
        begins = [width - len(request.ids) for request in requests]
        cache = growing_cache(self.decoder.model.config)
        new = [_Row(request, 0, random.Random(request.seed)) for request in requests]
        tokens = self.decoder.choose(self._forward(ids_NT, begins, cache, width), new)
        if self.cache is None:
            self.cache, self.end = cache, width
        elif width > self.end:
            self._move(width - self.end)
        free = [i for i, row in enumerate(self.rows) if row.done]
        places = [*free, *range(len(self.rows), len(self.rows) + len(new))][: len(new)]
        if cache is not self.cache:
            at = torch.tensor(places, device=self.device)
            for layer, other in zip(self.cache.layers, cache.layers, strict=True):
                layer.take_in(other, at)
        for place, row, begin, token in zip(places, new, begins, tokens, strict=True):
            row.begin = self.end - width + begin
            if place == len(self.rows):
                self.rows.append(row)
                self.waiting_tokens.append(token)
            self.rows[place], self.waiting_tokens[place] = row, token
            row.made.append(token)

    def step(self, *, thin: bool) -> None:
        """One more token of every row. `thin`: nobody waits for the rows that are done, so they may go."""
        if thin and self.open and 2 * self.live <= len(self.rows):
            kept = [i for i, row in enumerate(self.rows) if not row.done]
            at = torch.tensor(kept, device=self.device)
            for layer in self.cache.layers:
                layer.keep(at)
            self.rows = [self.rows[i] for i in kept]
            self.waiting_tokens = [self.waiting_tokens[i] for i in kept]
        unused = min(row.begin for row in self.rows if not row.done)
        if self.open and unused > self.end // UNUSED:
            self._move(-unused)
        ids_R1 = torch.tensor(self.waiting_tokens)[:, None]
        logits_RV = self._forward(ids_R1, [row.begin for row in self.rows], self.cache, self.end + 1)
        self.end += 1
        self.waiting_tokens = self.decoder.choose(logits_RV, self.rows)
        for row, token in zip(self.rows, self.waiting_tokens, strict=True):
            if not row.done:
                row.made.append(token)

    def finished(self) -> list[_Row]:
        """Rows that ended with their newest token, each once."""
        limit, eos = self.decoder.max_new_tokens, self.decoder.eos
        ended = [row for row in self.rows if not row.done and (row.made[-1] in eos or len(row.made) >= limit)]
        for row in ended:
            row.done = True
        return ended

    def _move(self, columns: int) -> None:
        for layer in self.cache.layers:
            layer.move(columns)
        self.end += columns
        for row in self.rows:
            row.begin = max(0, row.begin + columns)

    def _forward(self, ids_RT: Tensor, begins: list[int], cache: Any, end: int) -> Tensor:
        """Logits [R, V] after the last token; the ids stand in the columns up to `end`."""
        columns_T = torch.arange(end, device=self.device)
        begin_R1 = torch.tensor(begins, device=self.device)[:, None]
        positions_RT = (columns_T[None, end - ids_RT.shape[1] :] - begin_R1).clamp(min=0)
        found = self.decoder.model(
            input_ids=ids_RT.to(self.device),
            attention_mask=(columns_T[None] >= begin_R1).long(),
            position_ids=positions_RT,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: cache},
        )
        return found.logits[:, -1]
