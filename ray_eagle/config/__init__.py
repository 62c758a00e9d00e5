"""Every setting, typed and documented: one class a stage, in the module named as the package that reads it.

`ray_eagle.settings` fills them from files and flags.
"""

from pathlib import Path

from pydantic import model_validator

from ray_eagle.config.conversations import GenerateConfig
from ray_eagle.config.drafter import DrafterConfig
from ray_eagle.config.hidden_states import ExtractConfig, StatesConfig
from ray_eagle.config.preflight import PreflightConfig
from ray_eagle.config.probing import BreakevenConfig, ProbeConfig, SpeculationConfig
from ray_eagle.config.ray import RayConfig
from ray_eagle.config.section import Section
from ray_eagle.config.serving import ServeConfig
from ray_eagle.config.target import TargetConfig
from ray_eagle.config.training import TrainConfig
from ray_eagle.config.vocab import VocabConfig

__all__ = [
    "PRESETS",
    "BreakevenConfig",
    "Config",
    "DrafterConfig",
    "ExtractConfig",
    "GenerateConfig",
    "PreflightConfig",
    "ProbeConfig",
    "RayConfig",
    "Section",
    "ServeConfig",
    "SpeculationConfig",
    "StatesConfig",
    "TargetConfig",
    "TrainConfig",
    "VocabConfig",
]

PRESETS = Path(__file__).parent.parent / "presets"


class Config(Section):
    """A whole run."""

    preset: str | None = None
    """The preset that these settings start from."""
    run: str = ""
    """The run folder: an absolute path or URI in a job; every node must see it."""
    seed: int = 0
    """Seed of everything random."""
    train_anyway: bool = False
    """Go on to train although the given drafter already pays, or no drafter can."""
    allow_quarantine: bool = False
    """Call extraction done although samples were set aside (NaN states, longer than the context, deadly to actors)."""
    target: TargetConfig = TargetConfig()
    drafter: DrafterConfig = DrafterConfig()
    ray: RayConfig = RayConfig()
    preflight: PreflightConfig = PreflightConfig()
    breakeven: BreakevenConfig = BreakevenConfig()
    generate: GenerateConfig = GenerateConfig()
    extract: ExtractConfig = ExtractConfig()
    states: StatesConfig = StatesConfig()
    vocab: VocabConfig = VocabConfig()
    train: TrainConfig = TrainConfig()
    serve: ServeConfig = ServeConfig()
    probe: ProbeConfig = ProbeConfig()

    @model_validator(mode="after")
    def _engine_can(self) -> "Config":
        """What the engine cannot do is said before anything starts."""
        probes = [("breakeven", self.breakeven.concurrencies, self.breakeven.sweep)]
        if not self.probe.url:
            chosen = SpeculationConfig.model_validate(
                self.probe.model_dump(include={"steps", "topk", "draft_tokens"}), strict=True
            )
            probes.append(("probe", self.probe.concurrencies, (chosen, *self.probe.sweep)))
            if self.probe.temperature and self.serve.engine == "reference":
                raise ValueError("probe.temperature is above 0, but the reference engine is greedy: set serve.engine")
        for name, concurrencies, settings in probes:
            most = 1 if self.serve.engine == "reference" else self.serve.max_running
            if max(concurrencies) > most:
                way_out = "set serve.engine" if self.serve.engine == "reference" else "raise serve.max_running"
                raise ValueError(
                    f"{name}.concurrencies reaches {max(concurrencies)}, but the {self.serve.engine} engine decodes "
                    f"{most} at once: {way_out}"
                )
            if self.serve.engine != "sglang" and any(setting.topk > 1 for setting in settings):
                raise ValueError(f"{name} asks for topk above 1, but only the sglang engine drafts trees")
            chains = [setting for setting in settings if setting.topk == 1]
            if any(setting.draft_tokens not in (None, setting.steps + 1) for setting in chains):
                raise ValueError(f"{name}: with topk 1 draft_tokens is steps + 1, the whole chain: leave it out")
        return self
