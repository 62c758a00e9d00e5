"""Measurements: settings `probe.*` and `breakeven.*`."""

from typing import Annotated

from pydantic import Field, model_validator

from ray_eagle.config.section import Positive, Section


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
    max_new_tokens: Positive = 64
    """Tokens of each."""
    acceptance_length: Annotated[float, Field(ge=1)] = 2.5
    """Tokens that each measured cycle yields, at most those of its chain: an sglang server pretends to accept so many, since taking
    them in takes time too. 1 pretends nothing; other engines measure with what a random drafter yields, about 1."""
    baseline_tps: Annotated[float, Field(gt=0)] | None = None
    """Plain decoding speed in tokens/s: with `cycle_ms`, only the arithmetic is done, and nothing is served."""
    cycle_ms: Annotated[float, Field(gt=0)] | None = None
    """Time of one speculative cycle in milliseconds."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> "BreakevenConfig":
        if (self.baseline_tps is None) != (self.cycle_ms is None):
            raise ValueError("baseline_tps and cycle_ms belong together: give both or neither")
        return self

    @model_validator(mode="after")
    def _something_to_measure(self) -> "BreakevenConfig":
        if not (self.steps or self.sweep):
            raise ValueError("steps and sweep are both empty: give steps one number at least")
        return self
