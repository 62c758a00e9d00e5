"""What a named engine makes of a drafter folder: how it reads layer ids, tensor names and options.

Read in SGLang 0.5.17 and 0.5.23 and in its pull requests #24663 (other names and norms, 2026-05), #25454 (layer ids of
DeepSeek and Kimi, 2026-05) and #32334 (gpt-oss, `norm_before_fc`, 2026-07), and in vLLM and speculators 0.9.0. Latent attention
came to SGLang with #24826 (2026-05).
"""

import re
from dataclasses import dataclass
from typing import Literal

from ray_eagle.drafter.names import LAYER_0, MODEL, Naming
from ray_eagle.errors import ConfigError, InputError
from ray_eagle.target.layers import SGLANG_BEFORE, SGLANG_SINCE, layer_readings

Kind = Literal["sglang", "vllm", "reference"]
OLD = (0, 5, 11)
"""The last SGLang release that certainly lacks the changes of 2026-05."""
NEW = (0, 5, 13)
"""The first one that certainly has them."""
RELEASED_2026_08 = (0, 5, 17)
NEWEST = "0.5.23"
"""The newest SGLang release that was read."""
MEASURE = "Measure: ray-eagle probe tells whether it drafts as the walk over captured states predicts."
"""The way out where an engine is not known."""


@dataclass(frozen=True)
class Engine:
    """An engine, and its version where it matters."""

    kind: Kind
    version: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.version}".rstrip()

    @property
    def _release(self) -> tuple[int, ...]:
        return _numbers(self.version) if self.version else RELEASED_2026_08

    @property
    def caveat(self) -> str:
        """What to say of a release newer than what was read, since it is taken for that one; empty for any other."""
        if self.kind != "sglang" or not self.version or self._release <= _numbers(NEWEST):
            return ""
        return f"{self.name} is not known here, and taken for {NEWEST}, the newest known."

    def reading(self, ids: list[int], layers: int, model_type: str) -> list[int]:
        """The outputs of layers that it takes for these ids, with a target of `layers` layers and this family."""
        if self.kind == "reference":
            return list(ids)
        key = "vLLM" if self.kind == "vllm" else SGLANG_SINCE if self._release >= NEW else SGLANG_BEFORE
        return layer_readings(ids, layers, model_type)[key]

    def ids_for(self, outputs: list[int], layers: int, model_type: str) -> list[int]:
        """The ids to write so that it takes these outputs. Raises InputError where no ids say that."""
        for shift in (0, 1):
            ids = [layer + shift for layer in outputs]
            if self.reading(ids, layers, model_type) == outputs:
                return ids
        raise InputError(
            f"aux layers: {self.name}: expected ids that mean the outputs of {outputs} of a {model_type}, found none. "
            "It counts from the first id: train on other layers, or serve with another engine."
        )

    def reads_latent(self) -> bool:
        """Whether it has a drafter with latent attention at all."""
        return self.kind != "sglang" or self._release >= NEW

    def skipped_names(self, naming: Naming, prefixed_head: bool, *, latent: bool) -> str:
        """Which of a file's names it skips without a word; empty for none."""
        if self.kind != "sglang":
            return ""
        if latent:
            return f"{MODEL}*" if naming.prefix else ""
        if naming.layer == LAYER_0 and self._release < NEW:
            return f"{LAYER_0}*"
        return "model.lm_head.weight" if prefixed_head else ""

    def ignored_options(self, *, latent: bool) -> frozenset[str]:
        """Options of a config that it does not read."""
        if self.kind == "vllm":
            return frozenset({"norm_before_fc"} if latent else ())
        if self.kind == "reference":
            return frozenset({"fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"})
        if self._release < NEW:
            return frozenset({"fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"})
        if latent or self._release < RELEASED_2026_08:
            return frozenset({"norm_before_fc", "norm_before_residual"})
        return frozenset({"norm_before_residual"})


def parse_engine(text: str) -> Engine:
    """`sglang[==X.Y.Z]`, `vllm[==X.Y.Z]` or `reference`. Raises ConfigError for anything else."""
    found = re.fullmatch(r"(sglang|vllm|reference)(?:==(\d+\.\d+\.\d+\S*))?", text.strip())
    if not found or (found[1] == "reference" and found[2]):
        raise ConfigError(f"--engine: expected sglang[==X.Y.Z], vllm[==X.Y.Z] or reference, found {text!r}.")
    engine = Engine(found[1], found[2] or "")  # type: ignore[arg-type]
    if engine.kind == "sglang" and engine.version and OLD < _numbers(engine.version) < NEW:
        raise ConfigError(
            f"--engine {text}: in this release SGLang changed how it reads layer ids. Name 0.5.11 if yours reads them as "
            "before pull request #25454, 0.5.13 if it has it."
        )
    return engine


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    assert found  # by parse_engine
    return tuple(int(part) for part in found.groups())
