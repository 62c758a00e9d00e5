"""The stages `breakeven` and `probe`: serve a drafter, measure it, and put the prediction beside the measurement."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ray_eagle.config import Config, SpeculationConfig
from ray_eagle.conversations.prompts import Prompt, load_prompts, read_prompts
from ray_eagle.conversations.similarity import HashIndex, hashed_shingles, near_any
from ray_eagle.conversations.template import render_prompt
from ray_eagle.drafter.checkpoint import check_fits, load_drafter, read_shape
from ray_eagle.drafter.start import new_shape
from ray_eagle.errors import InputError, OriginError
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.probing.acceptance import Acceptance, acceptance
from ray_eagle.probing.predict import predict
from ray_eagle.probing.reports import Breakeven, Probe, ProbePrompt
from ray_eagle.probing.sweep import breakeven_with, needed_sentence, probe_with
from ray_eagle.progress import Progress
from ray_eagle.run import Folder, RunFolder
from ray_eagle.serving.app import deployed
from ray_eagle.serving.client import HttpClient
from ray_eagle.serving.engine import Speculation
from ray_eagle.stage import Outcome
from ray_eagle.target.loading import TargetFacts, head_and_embedding, load_tokenizer


def breakeven(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress) -> Outcome:
    """Measure R with a random drafter of the right shape. Writes breakeven.json."""
    settings = config.breakeven
    prompts, _ = probe_prompts(config, facts)
    given = config.drafter.path
    shape = read_shape(Path(given)) if given else new_shape(config.drafter, facts, config.vocab.size)
    progress.say("breakeven: serving the target with a random drafter")
    sweep = [Speculation(steps=steps) for steps in settings.steps] + _sweep(settings.sweep)
    yields = settings.acceptance_length
    if yields > 1 and config.serve.engine == "sglang":
        sweep = [
            Speculation(**{**dict(each), "simulated": min(yields, each.steps + 1, each.draft_tokens)}) for each in sweep
        ]
    with deployed(config, random_shape=shape, starting=sweep[0] if sweep else None) as client:
        chosen = prompts[: max(settings.prompts, *(2 * c for c in settings.concurrencies if c > 1), 1)]
        report = breakeven_with(
            client,
            chosen,
            engine=config.serve.engine,
            settings=sweep,
            concurrencies=settings.concurrencies,
            max_new_tokens=settings.max_new_tokens,
            seed=config.seed,
            progress=_following(progress, "breakeven"),
        )
    result = Breakeven(measured=report)
    for row in report.rows:
        name = Speculation(steps=row.steps, topk=row.topk, draft_tokens=row.draft_tokens or 0).name
        low, high = row.speed.break_even_interval
        progress.say(
            f"breakeven: with {name.replace(' steps', ' draft steps')} at concurrency {row.concurrency} a drafter must "
            f"reach {row.needed:.2f} [{low:.2f}, {high:.2f}] of at most {row.steps + 1}"
        )
    for steps in dict.fromkeys(row.steps for row in report.rows if row.topk == 1):
        if len(settings.concurrencies) > 1:
            progress.say(f"breakeven: {needed_sentence(report, steps)}")
    for note in report.notes:
        progress.say(f"breakeven: {note}")
    run.of("breakeven").write_json("breakeven.json", result.model_dump())
    return Outcome(facts=result.model_dump())


def probe(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress, *, stage: str = "probe") -> Outcome:
    """Serve a drafter (the trained one, or with stage `probe-given` the given one), measure and judge it. Writes probe.json."""
    folder = Folder.at(str(config.drafter.path)) if stage == "probe-given" else run.of("train")
    settings = config.probe
    prompts, dropped = probe_prompts(config, facts)
    with ExitStack() as stack:
        local = stack.enter_context(local_copy(folder))
        walks: dict[int, Acceptance | None] = {}

        def predict_at(steps: int) -> Acceptance | None:
            if steps not in walks:
                there = run.finished("extract")
                walks[steps] = predict_held_out(config, run, facts, local, progress, steps) if there else None
            return walks[steps]

        predict_at(settings.steps)  # first, so that a drafter for other layers is refused before anything is served
        chosen = Speculation(steps=settings.steps, topk=settings.topk, draft_tokens=settings.draft_tokens or 0)
        client, engine = stack.enter_context(_client(config, facts, local, progress, chosen))
        served = probe_with(
            client,
            prompts,
            engine=engine,
            settings=[chosen, *_sweep(settings.sweep)],
            concurrencies=settings.concurrencies,
            temperature=settings.temperature,
            outlived=bool(settings.url),
            max_new_tokens=settings.max_new_tokens,
            plain_prompts=settings.plain_prompts,
            confidence=settings.confidence,
            resamples=settings.resamples,
            seed=config.seed,
            progress=_following(progress, "probe"),
            predict=predict_at,
        )
        predicted = predict_at(served.steps)
    for row in served.sweep:
        low, high = row.speedup_interval
        progress.say(
            f"probe: {row.steps} steps, topk {row.topk}, {row.draft_tokens} tokens, concurrency {row.concurrency}: acceptance "
            f"length {row.acceptance_length:.3f} [{row.interval[0]:.3f}, {row.interval[1]:.3f}], break-even "
            f"{row.break_even:.3f} [{row.break_even_interval[0]:.3f}, {row.break_even_interval[1]:.3f}], speed-up "
            f"{row.speedup:.2f} [{low:.2f}, {high:.2f}]"
        )
    progress.say(f"probe: verdict {served.verdict}: {' '.join(served.reasons)}")
    result = Probe(served=served, predicted=predicted, near_duplicates=dropped)
    run.of(stage).write_json("probe.json", result.model_dump())
    return Outcome(
        samples=served.prompts, tokens=sum(len(row.tokens) for row in served.rows), facts={"verdict": served.verdict}
    )


def predict_held_out(
    config: Config, run: RunFolder, facts: TargetFacts, drafter_folder: Path, progress: Progress, steps: int
) -> Acceptance | None:
    """Acceptance that the walk over captured held-out states predicts, first answers only; None without such states."""
    states = HiddenStates(run.of("extract"), "held_out")
    if not len(states):
        return None
    drafter = load_drafter(drafter_folder)
    check_fits(
        drafter.shape,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        layers=facts.layers,
        where=drafter_folder,
        captured=facts.aux_layers,
    )
    torch.set_num_threads(max(1, round(config.serve.cpus)))
    head_VH, embedding_VH, _ = head_and_embedding(facts)
    categories = {prompt.id: prompt.category for prompt in load_prompts(config.generate)}
    progress.start("predict", len(states), "conversations")
    predictions = predict(
        drafter,
        states,
        embedding_VH.float(),
        head_VH[drafter.target_ids].float(),
        steps,
        first_answer=config.probe.max_new_tokens,
        logits=facts.logits,
        progress=lambda: progress.advance(1),
    )
    return acceptance(
        [p.accepted for p in predictions],
        [categories.get(p.source_id, "none") for p in predictions],
        steps=steps,
        confidence=config.probe.confidence,
        resamples=config.probe.resamples,
        seed=config.seed,
    )


def predict_from_shards(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress) -> Acceptance:
    """Prediction for the given drafter, or the run's own, without a server. Raises InputError without held-out states."""
    folder = Folder.at(config.drafter.path) if config.drafter.path else run.of("train")
    run.input_key("extract")
    with local_copy(folder) as local:
        found = predict_held_out(config, run, facts, local, progress, config.probe.steps)
    if found is None:
        raise InputError(
            f"{run.of('extract').path}: expected held-out conversations to walk over, found none. Raise "
            "generate.held_out_share in a new run."
        )
    return found


def probe_prompts(config: Config, facts: TargetFacts) -> tuple[list[ProbePrompt], int]:
    """First turns of the held-out prompts (or of probe.prompts) that fit and are near no training prompt; how many were near.

    Raises InputError when none is left.
    """
    known = load_prompts(config.generate)
    chosen: list[Prompt] = [p for p in known if p.split == "held_out"]
    if config.probe.prompts:
        chosen = read_prompts(config.probe.prompts)
    index = HashIndex.of([hashed_shingles(p.text) for p in chosen])
    near = near_any(index, (p.text for p in known if p.split != "held_out"), config.generate.near_duplicate)
    far = [p for i, p in enumerate(chosen) if i not in near]
    if not chosen:
        raise InputError(
            "probe: expected held-out prompts, found none. Raise generate.held_out_share, or set probe.prompts."
        )
    if not far:
        raise InputError(
            f"probe: expected held-out prompts, found {len(chosen)}, all close to training prompts. Raise "
            "generate.held_out_share, or name other prompts in probe.prompts."
        )
    tokenizer = load_tokenizer(facts, config.target)
    prompts = [
        ProbePrompt(id=p.id, category=p.category, input_ids=render_prompt(tokenizer, p.turns[0], p.system)) for p in far
    ]
    room = facts.max_position_embeddings - config.probe.max_new_tokens
    fitting = [p for p in prompts if len(p.input_ids) <= min(room, config.generate.max_prompt_tokens)]
    if not fitting:
        raise InputError(
            f"probe: expected prompts of at most {room} tokens (the target's context less probe.max_new_tokens), found none. "
            "Lower probe.max_new_tokens, or set probe.prompts."
        )
    return fitting[: config.probe.limit], len(chosen) - len(far)


@contextmanager
def local_copy(folder: Folder) -> Iterator[Path]:
    """The drafter folder as a local path: itself, or a temporary copy from another filesystem."""
    if folder.is_local:
        yield Path(folder.path)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("config.json", "model.safetensors"):
            (Path(temporary) / name).write_bytes(folder.read_bytes(name))
        yield Path(temporary)


@contextmanager
def _client(
    config: Config, facts: TargetFacts, drafter_folder: Path, progress: Progress, first: Speculation
) -> Iterator[tuple[Any, str]]:
    """A server that already runs at probe.url, or one deployed for as long as the probe lasts; and its engine.

    It starts as it will be measured first: one start less.
    """
    if config.probe.url:
        with HttpClient(config.probe.url, config.serve.token) as client:
            info = client.info()
            if info.target_fingerprint != facts.fingerprint:
                raise OriginError(
                    f"probe.url {config.probe.url} serves the target {info.target}, these settings name {facts.path}, which "
                    "differs. Name the same target, or leave probe.url out to deploy a server."
                )
            yield client, info.engine
        return
    progress.say(f"probe: serving the target with the drafter in {drafter_folder}")
    with deployed(config, drafter_folder=drafter_folder, starting=first) as client:
        yield client, config.serve.engine


def _following(progress: Progress, task: str) -> Callable[[int, int, str], None]:
    """A bar that starts with the first prompt, when it is known how many there are."""

    def advance(done: int, total: int, note: str) -> None:
        if done == 1:
            progress.start(task, total, "prompts")
        progress.advance(1, note)

    return advance


def _sweep(settings: Sequence[SpeculationConfig]) -> list[Speculation]:
    return [Speculation(steps=s.steps, topk=s.topk, draft_tokens=s.draft_tokens or 0) for s in settings]
