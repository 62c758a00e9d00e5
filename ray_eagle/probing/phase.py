"""A server in one setting, for as long as it is measured in it: what would falsify the figures is refused."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ray_eagle.errors import ServingError
from ray_eagle.probing.reports import ProbePrompt
from ray_eagle.serving.engine import EngineFacts, Speculation
from ray_eagle.serving.messages import GenerateReply

WARM_UP_TOKENS = 8
Replies = dict[int, GenerateReply]
"""By the number of the prompt."""


class BatchClient(Protocol):
    """What a sweep asks of a server."""

    def configure(self, speculation: Speculation | None) -> EngineFacts:
        """Decode so from now on."""

    def engine(self) -> EngineFacts:
        """What the engine says of itself now."""

    def decode(self, **request: Any) -> list[GenerateReply]:
        """Fields of DecodeRequest."""


@contextmanager
def as_found(client: BatchClient) -> Iterator[None]:
    """The server decodes afterwards as it did before."""
    before = client.engine().speculation
    try:
        yield
    finally:
        client.configure(before)


class Phase:
    """The engine in one setting, from its start to the check that it was the same server all the time."""

    def __init__(self, client: BatchClient, speculation: Speculation | None, concurrency: int) -> None:
        """Raises ServingError when a measurement would not mean what it says."""
        self._client = client
        self._asked = 0
        self.untimed: dict[int, tuple[int, int]] = {}
        """At each concurrency: whole batches that were never full, so that they could not be timed, of how many."""
        self.facts = client.configure(speculation)
        if self.facts.running:
            raise self._disturbed()
        if self.facts.simulated:
            raise ServingError(
                f"{self.facts.name}: acceptance is being simulated ({', '.join(self.facts.simulated)}), so there is nothing to "
                "measure. Unset it where the server starts (serve.env, the replica's environment)."
            )
        if self.facts.max_concurrency < concurrency:
            raise ServingError(
                f"{self.facts.name}: expected {concurrency} requests at once, found a server that decodes at most "
                f"{self.facts.max_concurrency} (/server_info). Raise serve.max_running, or leave it more memory "
                "(serve.memory_share, serve.context_length)."
            )

    def resume(self) -> None:
        """Decode so again, after another phase had its turn on an engine that holds both ready."""
        self._client.configure(self.facts.speculation)

    def ask(self, **request: Any) -> list[GenerateReply]:
        """`decode` of the client, counted."""
        self._asked += 1
        return self._client.decode(**request)

    def decode(
        self,
        prompts: Sequence[ProbePrompt],
        numbers: Sequence[int],
        concurrency: int,
        request: dict[str, Any],
        tick: Callable[[Sequence[GenerateReply]], None] | None,
    ) -> Replies:
        """Answers to some of the prompts, a batch a call; a first batch of a few tokens warms up, uncounted."""
        made: Replies = {}
        if numbers:
            few = {**request, "max_new_tokens": min(WARM_UP_TOKENS, request["max_new_tokens"])}
            ids = [prompts[numbers[i % len(numbers)]].input_ids for i in range(concurrency)]
            self.ask(prompts=ids, concurrency=concurrency, **few)
        for batch in batches(numbers, concurrency):
            ids = [prompts[number].input_ids for number in batch]
            replies = self.ask(prompts=ids, concurrency=concurrency, **request)
            made.update(zip(batch, replies, strict=True))
            if len(batch) == concurrency:
                missed, whole = self.untimed.get(concurrency, (0, 0))
                self.untimed[concurrency] = missed + (not any(r.step_seconds for r in replies)), whole + 1
            if tick:
                tick(replies)
        return made

    def finish(self) -> None:
        """Raises ServingError when the server is another one by now, or answered others as well."""
        after = self._client.engine()
        if after.server != self.facts.server or after.speculation != self.facts.speculation:
            raise ServingError(
                f"{self.facts.name}: expected one server all along ({self.facts.server}), found another one by now "
                f"({after.server}): it restarted, so the figures mix two. Look into its log, and probe again."
            )
        counts = after.requests > 0  # not every engine counts
        if counts and (after.running or after.requests - self.facts.requests != self._asked):
            raise self._disturbed()

    def _disturbed(self) -> ServingError:
        return ServingError(
            f"{self.facts.name}: expected a server that only this measurement uses, found other requests at the same time, "
            "which share its batches and its time. Send them elsewhere while it is measured, and probe again."
        )


def untimed_notes(phases: Sequence[Phase]) -> list[str]:
    """What the times do not rest on."""
    notes = []
    for c in dict.fromkeys(c for phase in phases for c in phase.untimed):
        counts = [phase.untimed[c] for phase in phases if c in phase.untimed]
        missed, whole = sum(m for m, _ in counts), sum(n for _, n in counts)
        if missed:
            notes.append(
                f"At concurrency {c}, {missed} of {whole} batches were not timed: an answer was done before the last one "
                "began. Raise max_new_tokens, or lower the concurrency."
            )
    return notes


def batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(numbers), size):
        yield numbers[first : first + size]
