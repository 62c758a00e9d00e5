"""The engine that the settings name, ready to decode."""

from pathlib import Path

from ray_eagle.config import ServeConfig, TargetConfig
from ray_eagle.conversations.template import stop_ids
from ray_eagle.drafter.checkpoint import check_drafter, check_fits
from ray_eagle.drafter.shape import DrafterShape
from ray_eagle.serving import reference
from ray_eagle.serving.engine import Engine, Speculation, need_one_drafter
from ray_eagle.serving.server import Models, ServerEngine
from ray_eagle.serving.sglang import SGLang
from ray_eagle.serving.vllm import VLLM
from ray_eagle.target.loading import TargetFacts, load_tokenizer, read_facts


def load_engine(
    target: TargetConfig,
    serve: ServeConfig,
    drafter_folder: Path | None,
    random_shape: DrafterShape | None,
    seed: int,
    starting: Speculation | None = None,
) -> tuple[Engine, TargetFacts, DrafterShape]:
    """The engine with the drafter of a folder, or a random one of a shape; the target's facts; the drafter's shape.

    `starting`: how a server drafts at first. Default: as its settings say.

    Raises TargetError, CheckpointError (a damaged drafter, or one made for another target), ConfigError unless exactly
    one drafter is given, ServingError when a server does not start.
    """
    if serve.engine == "reference":
        return reference.load_engine(target, serve, drafter_folder, random_shape, seed)
    need_one_drafter(drafter_folder, random_shape, serve.engine)
    facts = read_facts(target)
    shape = check_drafter(drafter_folder) if drafter_folder else random_shape
    assert shape is not None
    check_fits(
        shape,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        layers=facts.layers,
        where=drafter_folder or "random drafter",
    )
    models = Models(
        target=facts.path,
        drafter=drafter_folder,
        shape=shape,
        layers=facts.layers,
        model_type=facts.model_type,
        vocab_size=facts.vocab_size,
        max_positions=min(facts.max_position_embeddings, serve.context_length or facts.max_position_embeddings),
        seed=seed,
        ends=frozenset(stop_ids(facts.path, load_tokenizer(facts, target))),
        trust_remote_code=target.trust_remote_code,
    )
    kind = SGLang if serve.engine == "sglang" else VLLM
    return ServerEngine(kind(serve, models), serve, models, starting), facts, shape
