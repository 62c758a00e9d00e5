"""What every engine offers: one interface for the reference engine in process and for servers in child processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ray_eagle.config import ServeConfig
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.errors import ConfigError, InputError
from ray_eagle.serving.generation import Generation


class Speculation(BaseModel):
    """How a cycle drafts. With topk 1 a chain of `steps` tokens; with more, the best `draft_tokens` - 1 nodes of a tree."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: Annotated[int, Field(ge=1)]
    topk: Annotated[int, Field(ge=1)] = 1
    draft_tokens: int = 0
    """Tokens verified in one pass, the newest token included. 0: steps + 1."""
    simulated: Annotated[float, Field(ge=1)] | None = None
    """Tokens that each cycle yields, whatever is drafted (sglang only): to time cycles, never to judge a drafter."""

    @model_validator(mode="before")
    @classmethod
    def _whole_chain(cls, values: dict[str, int | None]) -> dict[str, int | None]:
        if isinstance(values, dict) and not values.get("draft_tokens"):
            return {**values, "draft_tokens": (values.get("steps") or 0) + 1}
        return values

    @property
    def name(self) -> str:
        """As in tables: `3 steps`, or `5 steps, topk 4, 16 tokens`."""
        plain = self.topk == 1 and self.draft_tokens == self.steps + 1
        return f"{self.steps} steps" + ("" if plain else f", topk {self.topk}, {self.draft_tokens} tokens")


@dataclass(frozen=True)
class Work:
    """One answer to make."""

    input_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    gaps: bool = False
    """Also say how far apart the two best tokens were at each step (plain decoding only)."""
    past_end: bool = False
    """Go on behind an end-of-sequence token, up to max_new_tokens."""


class EngineFacts(BaseModel):
    """What an engine says of itself; a measurement compares it before and after."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: str = ""
    server: str = ""
    """Identity of the running server: another one after every restart."""
    speculation: Speculation | None = None
    """As it decodes now; None is plain decoding."""
    max_concurrency: int = 1
    """Requests that it really decodes together."""
    simulated: list[str] = []
    """Settings by which it only pretends to accept drafts, other than its `speculation`."""
    flags: list[str] = []
    """The flags that make a server of this kind draft in this way."""
    dtype: str = ""
    device: str = ""
    max_positions: int = 0
    side_by_side: bool = False
    """Plain decoding and one way to speculate are both ready: to `configure` the other one costs nothing."""
    requests: int = 0
    """Calls of `generate` that this server answered so far, where the engine counts them: others' requests at the same time falsify a measurement."""
    running: int = 0
    """Of them, those not answered yet."""


class Engine(Protocol):
    """Greedy or sampled decoding of one target, plain or with one drafter.

    `generate` may be called from several threads at once; `configure` and `close` only while nothing is decoded.
    """

    parallel: int
    """Calls of `generate` that it can serve at the same time."""

    def configure(self, speculation: Speculation | None) -> None:
        """Decode so from now on (None: plainly). Cheap when nothing changes, a restart of the server otherwise
        (or the change to another one that is up: `EngineFacts.side_by_side`).

        Raises ConfigError for what the engine cannot do, ServingError when its server does not start.
        """

    def generate(self, work: Sequence[Work], concurrency: int = 1) -> list[Generation]:
        """Answers in the order given, `concurrency` at a time.

        Raises InputError for a prompt that does not fit, ConfigError for what the engine cannot do, ServingError when its
        server dies, hangs or answers something unusable.
        """

    def facts(self) -> EngineFacts:
        """Asked of the running server."""

    def health(self) -> None:
        """Make one real token. Raises ServingError."""

    def check(self) -> None:
        """Quickly, and at any time: raises ServingError when the engine can never answer again."""

    def close(self) -> None:
        """Leave nothing behind: no process, no memory."""


def check_prompt(prompt_ids: Sequence[int], max_new_tokens: int, *, vocabulary: int, max_positions: int) -> None:
    """Raises InputError for a prompt that is empty, too long for the context, or of foreign tokens."""
    if not prompt_ids:
        raise InputError("prompt: expected at least one token, found none. Give text, messages or input_ids.")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
        raise InputError(
            f"prompt: expected token ids from 0 to {vocabulary - 1}, found {min(prompt_ids)} to {max(prompt_ids)}. "
            "Tokenize with the target's tokenizer."
        )
    if max_new_tokens < 1 or len(prompt_ids) + max_new_tokens > max_positions:
        raise InputError(
            f"prompt of {len(prompt_ids)} tokens and max_new_tokens {max_new_tokens}: expected at least one new "
            f"token and at most {max_positions} in all (the target's max_position_embeddings). Shorten either."
        )


def need_one_drafter(drafter_folder: Path | None, random_shape: DrafterShape | None, engine: str) -> None:
    """Raises ConfigError unless exactly one drafter is given."""
    if (drafter_folder is None) == (random_shape is None):
        raise ConfigError(
            f"{engine} engine: expected either a drafter folder or a random shape, found both or neither."
        )


def starting_speculation(config: ServeConfig) -> Speculation:
    """How a server drafts if nobody says otherwise."""
    return Speculation(steps=config.steps, topk=config.topk, draft_tokens=config.draft_tokens or 0)
