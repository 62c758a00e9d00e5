"""What preflight found. A bad thing is a finding with a way out, never an exception."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, computed_field

Level = Literal["ok", "warning", "error"]


class Finding(BaseModel):
    """The outcome of one check."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Level
    check: str
    """What was looked at, in a few words."""
    message: str
    fix: str = ""
    """The way out; empty when the message ends with it, or nothing is wrong."""


class Estimate(BaseModel):
    """What the run will cost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int
    tokens: int
    supervised_tokens: int
    hidden_state_bytes: int
    """Of the whole hidden-state dataset."""
    weights_bytes: int
    """Of the target's weights on disk, which every actor reads once."""
    hours: float | None = None
    """Of extraction, where a rate is known."""


class PreflightReport(BaseModel):
    """All findings, and the estimate where the target could be read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    findings: tuple[Finding, ...]
    estimate: Estimate | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """No finding is an error."""
        return all(finding.level != "error" for finding in self.findings)
