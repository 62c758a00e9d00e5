"""Who captures: a pool of actors that each hold the whole target, or of pipelines that each spread it over several GPUs."""

from itertools import accumulate, pairwise
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_eagle.cluster import ensure_resources, marked, shortage
from ray_eagle.config import Config, ExtractConfig
from ray_eagle.errors import ConfigError
from ray_eagle.hidden_states import extractor
from ray_eagle.hidden_states import pipeline as staged
from ray_eagle.hidden_states.extractor import Extractor
from ray_eagle.hidden_states.imported import Importer, Norm
from ray_eagle.hidden_states.pipeline import Pipeline
from ray_eagle.hidden_states.plan import Unit
from ray_eagle.pool import ActorPool, Member
from ray_eagle.run import Folder
from ray_eagle.target.loading import TargetFacts, choose_dtype
from ray_eagle.target.split import layer_costs, split_layers

NAME = "eagle-extract"


def make_pool(config: Config, facts: TargetFacts, folder: Folder, imported: Norm | None = None) -> ActorPool:
    """The pool for a dataset folder; waits for its resources. Raises WorkerError that names what is missing.

    `imported`: states are read from `states.path` instead, where the last one was taken so.
    """
    settings = config.extract
    target = config.target.model_copy(update={"dtype": compute_dtype(config)})
    layers = [range(facts.layers)] if imported else stage_layers(settings, facts)
    bundle = {"CPU": settings.cpus, "GPU": settings.gpus}
    ensure_resources(bundle, settings.actors * len(layers), config.ray.wait_s)

    def whole(name: str) -> Member:
        actor = ray.remote(Importer if imported else Extractor).options(
            num_cpus=settings.cpus,
            num_gpus=settings.gpus,
            **marked(settings.gpus),
            **_options(name, extractor.CONCURRENCY),
        )
        more = (config.states, imported) if imported else ()
        return Member(actor.remote(target, facts, settings, folder, name, *more))

    def pipeline(name: str) -> Member:
        group = placement_group([bundle] * len(layers), strategy="PACK")
        head = ray.remote(Pipeline).options(
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            **_options(name, staged.CONCURRENCY),
        )
        actor = head.remote(target, facts, settings, folder, layers, name)
        return Member(actor, close=lambda: remove_placement_group(group))

    def samples(unit: Unit) -> list[str]:
        return [sample.sample_id for sample in unit.samples]

    make, concurrency = (whole, extractor.CONCURRENCY) if len(layers) == 1 else (pipeline, staged.CONCURRENCY)
    return ActorPool(
        make,
        settings.actors,
        NAME,
        concurrency=concurrency,
        samples=samples,
        shortage=lambda: shortage(bundle, len(layers)),
        patience_s=config.ray.wait_s,
    )


def compute_dtype(config: Config) -> str:
    """Chosen once, by the driver: actors on different machines must not choose for themselves."""
    device = torch.device("cuda" if config.extract.gpus else "cpu")
    return str(choose_dtype(config.target.dtype, device)).removeprefix("torch.")


def stage_layers(settings: ExtractConfig, facts: TargetFacts) -> list[range]:
    """The layers of each stage. Raises ConfigError when `extract.split` does not give all of them away."""
    if not settings.split:
        stages = settings.stages
        return split_layers(layer_costs(facts), stages) if stages > 1 else [range(facts.layers)]
    if len(settings.split) != settings.stages or sum(settings.split) != facts.layers:
        raise ConfigError(
            f"extract.split: expected {settings.stages} numbers (extract.stages) that add up to the target's {facts.layers} "
            f"layers, found {list(settings.split)}. Leave it out for an even split."
        )
    return [range(start, end) for start, end in pairwise(accumulate(settings.split, initial=0))]


def _options(name: str, concurrency: int) -> dict[str, Any]:
    return {"name": name, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": concurrency}
