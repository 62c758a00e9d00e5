"""What a stage hands back."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Amounts for the report, and anything that decides what comes next."""

    samples: int = 0
    tokens: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
