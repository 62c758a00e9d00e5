"""The server: settings `serve.*`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ray_eagle.config.section import Positive, Section


class ServeConfig(Section):
    """The speculative server."""

    engine: Literal["reference", "sglang", "vllm"] = "reference"
    """`reference`: target and drafter in process, greedy chain speculation, batch 1. `sglang`, `vllm`: their servers, as child processes."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of target and drafter; in float32 speculative text equals plain text token for token."""
    cpus: Annotated[float, Field(gt=0)] = 1
    """Logical CPUs of the replica; torch uses as many threads."""
    gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs of the replica; sglang and vllm spread the target over all of them (tensor parallel)."""
    steps: Positive = 3
    """Draft steps of each speculative cycle that the server starts with; a probe sets its own."""
    topk: Positive = 1
    """Branches of each draft step (sglang only); 1 drafts a chain."""
    draft_tokens: Positive | None = None
    """Tokens verified in one pass. Default: steps + 1, the whole chain."""
    python: str | None = None
    """Interpreter that has sglang or vllm installed. Default: the replica's own."""
    env: dict[str, str] = Field(default={})
    """Environment variables of that server; $NAME is replaced from the replica's environment."""
    args: tuple[str, ...] = ()
    """Arguments added at the end of the server's command line: attention backend, quantization, ..."""
    draft_attention: str | None = None
    """Attention backend of the drafter (sglang), where the target's does not suit it (MLA targets)."""
    context_length: Positive | None = None
    """Longest context that the server accepts. Default: the target's."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of GPU memory for weights and cache. Default: the server's own choice."""
    side_by_side: bool | None = None
    """Keep a second server without speculation beside the first (sglang, vllm), so that probes alternate between both and a
    machine whose speed drifts does not tilt break-even. Each takes memory_share. Default: where that is at most 0.45."""
    max_running: Positive = 16
    """Requests decoded together at most; CUDA graphs are captured up to this batch size."""
    version: str | None = None
    """Treat the installed sglang as this version, when its own is not in the table of known ones."""
    host: str = "127.0.0.1"
    """Address the HTTP endpoints bind to; loopback unless told otherwise. The child server listens on loopback always."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """HTTP port; 0 takes a free one."""
    token: Annotated[str, Field(min_length=1)] | None = None
    """Bearer token that every request must carry. Default: none."""
    start_s: Annotated[float, Field(gt=0)] = 900
    """Seconds within which the replica must become healthy, and a child server at each start."""
    hang_s: Annotated[float, Field(gt=0)] = 300
    """Seconds without a sign of life after which a child server counts as hanging, and its replica as failed."""

    @model_validator(mode="after")
    def _engine_can(self) -> "ServeConfig":
        if self.topk > 1 and self.engine != "sglang":
            raise ValueError(f"topk is {self.topk}, but only the sglang engine drafts trees")
        return self
