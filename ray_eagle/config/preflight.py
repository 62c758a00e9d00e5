"""Checks: settings `preflight.*`."""

from typing import Annotated

from pydantic import Field

from ray_eagle.config.section import Positive, Section


class PreflightConfig(Section):
    """Checks before anything expensive starts."""

    tokens_per_sample: Positive = 1000
    """Assumed length of a conversation in the estimate of bytes and hours."""
    supervised_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Assumed share of it that the assistant wrote."""
    min_free_gib: Annotated[float, Field(ge=0)] = 1
    """Free disk that must remain after the estimate."""
