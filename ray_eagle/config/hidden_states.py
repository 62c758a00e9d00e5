"""Hidden states, captured or imported: settings `extract.*` and `states.*`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ray_eagle.config.ray import ActorConfig
from ray_eagle.config.section import Positive, Section, expand


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

    path: Annotated[str, AfterValidator(expand)] = ""
    """Folder of one file a sample: SpecForge, AngelSlim, ModelOpt or speculators. Empty: the target is run."""
    layers: tuple[int, int, int] | None = None
    """The three aux layers that were captured, in the convention below. The files do not say; you must."""
    convention: Literal["output", "input"] = "output"
    """What those ids mean: the output of layer L, 0-based (SpecForge, TorchSpec, ModelOpt, AngelSlim), or its input (vLLM, speculators)."""
    norm: Literal["auto", "after", "before"] = "auto"
    """Was the last state taken after or before the target's final norm? auto: by their size."""
    masks: Annotated[str, AfterValidator(expand)] = ""
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
