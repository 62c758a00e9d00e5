"""What extraction will cost, before it starts: bytes from the plan, seconds and memory from a short calibration.

The calibration is the real thing on a small share of the samples: the same actors, packs, format and filesystem, in a scratch
folder that is deleted at the end. It does nothing to the run.
"""

import random
import secrets
import shutil
import time

from pydantic import BaseModel

from ray_eagle.config import Config
from ray_eagle.conversations.inputs import count_rows
from ray_eagle.errors import QuarantineError
from ray_eagle.hidden_states.actors import make_pool
from ray_eagle.hidden_states.dataset import PLAN, read_records
from ray_eagle.hidden_states.extract import plan_dataset, quarantine_message
from ray_eagle.hidden_states.plan import TokenSample, Unit
from ray_eagle.hidden_states.schema import sample_bytes, sample_id
from ray_eagle.hidden_states.shard import UnitRecord
from ray_eagle.progress import Progress
from ray_eagle.run import Folder, RunFolder
from ray_eagle.target.loading import TargetFacts

MOST_ASSUMED = 2000
"""Conversations that are made up; more of them would all be alike."""
PACKS_PER_UNIT = 4
"""Packs of a calibration unit: small units, so that a minute holds many."""


class Forecast(BaseModel):
    """What `extract` will take with these settings."""

    samples: int
    tokens: int
    supervised_tokens: int
    assumed: bool
    """The conversations are not there yet: counts come from preflight.tokens_per_sample and supervised_share."""
    bytes: int
    """Of the shards."""
    free_bytes: int | None
    """At the run folder; None where that is not known."""
    state_dtype: str
    actors: int
    stages: int
    device: str | None = None
    """What the calibration ran on; it and everything below is None without one."""
    tokens_per_second: float | None = None
    """Of all actors together, states written."""
    bytes_per_second: float | None = None
    start_seconds: float | None = None
    """Until the first unit was there: loading the target."""
    seconds: float | None = None
    """Of the whole extraction, the start included."""
    memory_bytes: int | None = None
    """The most memory that one actor took: of its GPU, or of the host without one."""
    calibrated_tokens: int | None = None


def forecast(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress, seconds: float) -> Forecast:
    """Count what there is to capture and, for `seconds` > 0, measure how fast that goes.

    Raises what `extract` would raise.
    """
    prompts = 0
    if assumed := run.finished("generate") is None:
        prompts = count_rows(config.generate.prompts, config.generate.limit)
        samples = assumed_samples(config, facts, min(prompts, MOST_ASSUMED))
        times = prompts / max(1, len(samples))
    else:
        samples, times = samples_to_come(config, run, facts), 1.0
    tokens = round(times * sum(len(s.input_ids) for s in samples))
    supervised = round(times * sum(s.teaching for s in samples))
    found = Forecast(
        samples=prompts if assumed else len(samples),
        tokens=tokens,
        supervised_tokens=supervised,
        assumed=assumed,
        bytes=sample_bytes(tokens, supervised, facts.hidden_size, config.extract.state_dtype),
        free_bytes=shutil.disk_usage(disk).free if (disk := run.disk()) else None,
        state_dtype=config.extract.state_dtype,
        actors=config.extract.actors,
        stages=config.extract.stages,
    )
    if not seconds or not samples:
        return found
    scratch = run.folder(f".calibration-{secrets.token_hex(4)}")
    scratch.create()
    try:
        return _measured(found, config, facts, scratch, samples, progress, seconds)
    finally:
        scratch.delete()


def samples_to_come(config: Config, run: RunFolder, facts: TargetFacts) -> list[TokenSample]:
    """The samples that `extract` would capture: neither committed already nor borrowed."""
    units, plan, _ = plan_dataset(config, run, facts)
    folder = run.of("extract")
    committed = read_records(folder, plan) if folder.exists(PLAN) else {}
    return [s for unit in units if unit.index not in committed and not unit.lender for s in unit.samples]


def assumed_samples(config: Config, facts: TargetFacts, prompts: int) -> list[TokenSample]:
    """Random tokens of the assumed length."""
    longest = min(config.extract.max_length, facts.max_position_embeddings)
    length = min(config.preflight.tokens_per_sample, longest)
    answer = max(1, round(length * config.preflight.supervised_share))
    mask = tuple([0] * (length - answer) + [1] * answer)
    rng = random.Random(config.seed)
    made = []
    for number in range(prompts):
        ids = tuple(rng.choices(range(facts.vocab_size), k=length))
        made.append(TokenSample(sample_id(list(ids), list(mask)), f"assumed-{number}", "train", ids, mask))
    return made


def _measured(
    found: Forecast,
    config: Config,
    facts: TargetFacts,
    scratch: Folder,
    samples: list[TokenSample],
    progress: Progress,
    seconds: float,
) -> Forecast:
    units = calibration_units(samples, PACKS_PER_UNIT * config.extract.tokens_per_batch, config.seed)
    progress.start("plan", seconds, "s")
    began = time.monotonic()
    arrivals: list[tuple[float, UnitRecord]] = []
    since = 0.0
    for _, record in make_pool(config, facts, scratch).run(units):
        arrivals.append((time.monotonic(), record))
        scratch.delete_file(record.file)
        done, since = since, arrivals[-1][0] - arrivals[0][0]
        progress.advance(min(since, seconds) - done, f"{sum(r.tokens for _, r in arrivals):,} tokens")
        if since >= seconds:
            break
    first = arrivals[0]
    start = max(0.0, first[0] - began - first[1].made_by["seconds"])
    # the first units of all actors arrive together: what came after them, in the time after them, or else everything
    warm = 2 * config.extract.actors
    steady = len(arrivals) > 2 * warm
    counted = [record for _, record in (arrivals[warm:] if steady else arrivals)]
    took = arrivals[-1][0] - (arrivals[warm - 1][0] if steady else began + start)
    tokens, written = sum(r.tokens for r in counted), sum(r.bytes for r in counted)
    if not tokens:
        raise QuarantineError(quarantine_message([q for r in counted for q in r.quarantined], scratch))
    overhead = written / sum(_payload(record, found, facts) for record in counted)
    return found.model_copy(
        update={
            "bytes": round(found.bytes * overhead),
            "device": first[1].made_by["device"],
            "tokens_per_second": tokens / took,
            "bytes_per_second": written / took,
            "start_seconds": start,
            "seconds": start + found.tokens * took / tokens,
            "memory_bytes": max(record.made_by["peak_bytes"] for _, record in arrivals),
            "calibrated_tokens": sum(record.tokens for _, record in arrivals),
        }
    )


def calibration_units(samples: list[TokenSample], tokens: int, seed: int) -> list[Unit]:
    """A random mixture in units of about so many tokens, sorted by length inside as the real ones are."""
    order = random.Random(seed).sample(samples, len(samples))
    units: list[Unit] = []
    group: list[TokenSample] = []
    for sample in order:
        group.append(sample)
        if sum(len(s.input_ids) for s in group) >= tokens:
            units.append(_unit(len(units), group))
            group = []
    return [*units, _unit(len(units), group)] if group else units


def _unit(index: int, group: list[TokenSample]) -> Unit:
    return Unit(index, "train", tuple(sorted(group, key=lambda s: len(s.input_ids))))


def _payload(record: UnitRecord, found: Forecast, facts: TargetFacts) -> int:
    return sum(sample_bytes(row.tokens, row.teaching, facts.hidden_size, found.state_dtype) for row in record.rows)
