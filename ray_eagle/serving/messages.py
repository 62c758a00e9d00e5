"""What clients and the server say to each other, over HTTP and by deployment handle alike."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.serving.engine import Speculation
from ray_eagle.serving.generation import Generation, VerifyPass

Positive = Annotated[int, Field(ge=1)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(BaseModel):
    """One chat turn; what else it carries goes to the chat template as it is."""

    model_config = ConfigDict(frozen=True, extra="allow")

    role: str
    content: str


class PromptSource(Message):
    """A prompt in exactly one form."""

    text: str | None = None
    """Tokenized as it stands, without a chat template."""
    messages: list[Turn] | None = None
    """Chat turns, put through the target's chat template."""
    input_ids: list[int] | None = None
    """Token ids of the target's tokenizer."""

    @model_validator(mode="after")
    def _exactly_one(self) -> "PromptSource":
        given = [name for name in ("text", "messages", "input_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of text, messages and input_ids, found {given or 'none'}")
        for words in (self.text or "", *(turn.content for turn in self.messages or ())):
            if any("\ud800" <= character <= "\udfff" for character in words):
                raise ValueError(f"expected Unicode, found half of a surrogate pair in {given[0]}")
        return self


class GenerateRequest(PromptSource):
    """POST /generate."""

    max_new_tokens: Positive = 64
    steps: Positive | None = None
    """Draft steps of each cycle. Default: as the engine drafts now; only the reference engine can change it for one request."""
    plain: bool = False
    """Decode without speculation."""


class ConfigureRequest(Message):
    """POST /configure: how the engine decodes from now on. A server in a child process restarts for it."""

    speculation: Speculation | None
    """null: without speculation."""


class DecodeRequest(Message):
    """POST /decode: a batch of prompts, decoded as the engine is configured."""

    prompts: Annotated[list[list[int]], Field(min_length=1)]
    """Token ids of each."""
    max_new_tokens: Positive = 64
    concurrency: Positive = 1
    """How many at once."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    gaps: bool = False
    """Also say how far apart the two best tokens were (without speculation only)."""
    past_end: bool = False
    """Go on behind an end-of-sequence token, up to max_new_tokens (sglang and vllm)."""


class GenerateReply(Message):
    """The answer, which tokens were drafted and accepted, and the time it took."""

    text: str
    """The answer, special tokens left out."""
    tokens: list[int]
    prompt_length: int
    """Tokens of the prompt, so the answer's first token has this index."""
    passes: list[VerifyPass]
    finish_reason: Literal["stop", "length"]
    prefill_seconds: float
    decode_seconds: float
    decode_tokens: int
    step_seconds: float
    gaps: list[float] = []

    @property
    def generation(self) -> Generation:
        return Generation(
            self.tokens,
            self.passes,
            self.finish_reason,
            self.prefill_seconds,
            self.decode_seconds,
            self.decode_tokens,
            self.step_seconds,
            self.gaps,
        )


class DecodeReply(Message):
    """The answers, in the order of the prompts."""

    replies: list[GenerateReply]


class ProbeItem(PromptSource):
    """One prompt of a probe."""

    id: str
    category: str = "all"


class ProbeRequest(Message):
    """POST /probe."""

    prompts: Annotated[list[ProbeItem], Field(min_length=1)]
    steps: Positive = 3
    topk: Positive = 1
    draft_tokens: Positive | None = None
    sweep: list[Speculation] = []
    """Further settings to measure."""
    concurrencies: Annotated[list[Positive], Field(min_length=1)] = [1]
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_new_tokens: Positive = 64
    plain_prompts: Positive = 16
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    resamples: Positive = 2000
    seed: int = 0


class Info(Message):
    """GET /info."""

    engine: str
    target: str
    target_fingerprint: dict[str, str]
    drafter: str
    """Folder of the drafter, or `random`."""
    shape: DrafterShape
    dtype: str
    device: str
    threads: int
    max_positions: int
    versions: dict[str, str]
    node: str
    pid: int


class Health(Message):
    """GET /health: the engine made one real token in this time."""

    ok: bool
    seconds: float
