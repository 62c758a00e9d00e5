"""What every group of settings is made of."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]


def expand(path: str | None) -> str | None:
    """`~` as the home folder, here, once, for the many that open it."""
    return str(Path(path).expanduser()) if path and "://" not in path else path


class Section(BaseModel):
    """A group of settings: frozen, no unknown keys, finite numbers, the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
