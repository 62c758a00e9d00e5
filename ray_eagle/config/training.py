"""Training: settings `train.*`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ray_eagle.config.section import Positive, Section, Share


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
