"""Making conversations: settings `generate.*`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ray_eagle.config.ray import ActorConfig
from ray_eagle.config.section import Positive, Share


def _hub_as_uri(source: str) -> str:
    """`hub:NAME` as `hub://NAME`, which nobody takes for a path."""
    return f"hub://{source[4:]}" if source.startswith("hub:") and not source.startswith("hub://") else source


class GenerateConfig(ActorConfig):
    """Let the target write the answers that the drafter will learn from."""

    prompts: Annotated[str, AfterValidator(_hub_as_uri)] = "builtin"
    """File of prompts or whole conversations (JSONL, JSON, Parquet, Arrow, text), `hub:NAME[:SPLIT]`, or `builtin`."""
    shape: Literal["auto", "messages", "sharegpt", "prompt", "turns", "text"] = "auto"
    """How its rows are written. auto: by the first rows of the file."""
    answers: Literal["regenerate", "keep"] = "regenerate"
    """Let the target answer, or keep the answers of the file. What the target did not write trains a worse drafter."""
    backend: Literal["embedded", "openai", "sglang", "ray_eagle"] = "embedded"
    """Who answers: actors here; or servers: OpenAI's chat API (text), SGLang's own API, or this project's server (exact ids)."""
    urls: tuple[str, ...] = ()
    """Addresses of those servers; each gets a share of the prompts, and one that dies is left out until it is back."""
    model: str | None = None
    """Name under which an openai server serves the target. Default: the only one that it lists."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' key. The key itself is stored nowhere."""
    in_flight: Positive = 32
    """Requests at each server at the same time."""
    tries: Positive = 8
    """A prompt that fails so often, while others are answered, is rejected."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800
    """Seconds for one answer, after which it counts as failed and is asked for again."""
    server_wait_s: Annotated[float, Field(gt=0)] = 600
    """Seconds without any server that answers, after which the stage ends with each one's last failure."""
    drop_cut: bool = False
    """Reject answers that reach max_new_tokens; of a longer conversation the turns before are kept."""
    turns: Literal["all", "last", "split"] = "all"
    """Answers to learn from: all; the last; or all, with a sample of its own for each that the template changes later."""
    reasoning: Literal["keep", "drop", "last"] = "keep"
    """Reasoning of kept answers: all of it, none, or that after the last user message."""
    reasoning_marks: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    """What encloses reasoning where the chat template does not write it itself."""
    supervise_reasoning: bool = True
    """Learn from the reasoning of kept answers too; off leaves it in the text, unsupervised."""
    template_system: Literal["keep", "refuse"] = "keep"
    """A system text that the chat template writes unasked: keep it (servers render it too) or refuse to start."""
    limit: Positive | None = None
    """Use only the first N rows of the file."""
    max_new_tokens: Positive = 512
    """Answers are cut here; a cut answer is kept (but see drop_cut), and its finish reason says `length`."""
    max_prompt_tokens: Positive = 4096
    """A longer prompt is rejected, with its reason, in rejected.jsonl."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy. Sampled text cannot predict greedy serving (EAGLE-3 walk)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus of sampled answers."""
    batch_size: Positive = 32
    """Answers decoded together; the place of a finished one goes to the next prompt of its part."""
    part_size: Positive | None = None
    """Prompts of a part, the unit that is committed and resumed. Default: four times batch_size; with servers, batch_size."""
    held_out_share: Share = 0.1
    """Share of prompts kept for the probe: never trained on, and never close to a prompt that is."""
    validation_share: Share = 0.1
    """Share of prompts whose conversations choose the best checkpoint."""
    near_duplicate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A held-out prompt this similar (Jaccard, character 5-grams) to a training prompt is trained on instead."""

    @field_validator("urls", mode="before")
    @classmethod
    def _addresses(cls, urls: Any) -> Any:
        """One text too, and addresses as people copy them, with `/v1` at their end."""
        several = urls.replace(",", " ").split() if isinstance(urls, str) else urls
        if not isinstance(several, list | tuple) or not all(isinstance(url, str) for url in several):
            return several
        for url in several:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} does not begin with http:// or https://")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in several)

    @model_validator(mode="after")
    def _servers(self) -> "GenerateConfig":
        if (self.backend == "embedded") == bool(self.urls):
            raise ValueError(f"backend is {self.backend}, but urls {'are given' if self.urls else 'is empty'}")
        if self.backend != "embedded" and self.answers == "keep":
            raise ValueError(f"backend is {self.backend}, but kept answers need no server")
        if self.backend == "ray_eagle" and (self.temperature or self.top_p < 1):
            raise ValueError("backend ray_eagle answers greedily: leave temperature and top_p out")
        return self

    @model_validator(mode="after")
    def _some_to_train_on(self) -> "GenerateConfig":
        if (taken := self.held_out_share + self.validation_share) >= 1:
            raise ValueError(f"held_out_share and validation_share are {taken:g} together: nothing is left to train on")
        return self

    @property
    def copies(self) -> int:
        """Of the target, that this stage loads."""
        return self.actors if self.backend == "embedded" else 0
