"""What a stage hands back, and what it was made with."""

import importlib.metadata
import platform
from dataclasses import dataclass, field
from typing import Any

PACKAGES = ("ray", "torch", "transformers", "pyarrow", "safetensors", "numpy")


@dataclass(frozen=True)
class Outcome:
    """Amounts for the report, and anything that decides what comes next."""

    samples: int = 0
    tokens: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Versions of what decides a result, from the installed metadata: nothing is imported."""
    import ray_eagle

    found = {"python": platform.python_version(), "ray_eagle": ray_eagle.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found
