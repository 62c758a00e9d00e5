"""The cluster and the actors on it: settings `ray.*`, and what `generate.*` and `extract.*` share."""

from typing import Annotated

from pydantic import Field

from ray_eagle.config.section import Positive, Section


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
