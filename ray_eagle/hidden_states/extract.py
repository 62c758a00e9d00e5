"""Stage `extract`: actors run the target over the conversations and write its states, a unit at a time."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from ray_eagle.cluster import ensure_resources
from ray_eagle.config import Config, ExtractConfig, TargetConfig
from ray_eagle.conversations.conversation import read_conversations
from ray_eagle.errors import InputError, TargetError
from ray_eagle.hidden_states.dataset import DatasetWriter, UnitRecord, write_shard
from ray_eagle.hidden_states.plan import DatasetPlan, Unit, UnitPlan, plan_packs, plan_units, tokenise
from ray_eagle.hidden_states.schema import STATE_DTYPES, Sample
from ray_eagle.metrics import Counters
from ray_eagle.pool import ActorPool, Member, this_node
from ray_eagle.progress import Progress, Rate
from ray_eagle.run import Folder, RunFolder
from ray_eagle.stage import Outcome
from ray_eagle.target.capture import capture_pack
from ray_eagle.target.loading import TargetFacts, load_model
from ray_eagle.target.parts import find_parts


class Extractor:
    """Holds the target, captures units and hands their states to the shard writer; the body of one actor."""

    def __init__(self, target: TargetConfig, facts: TargetFacts, settings: ExtractConfig, folder: Folder) -> None:
        torch.set_num_threads(max(1, round(settings.cpus)))
        self.facts = facts
        self.settings = settings
        self.folder = folder
        self.model = load_model(facts, target, torch.device("cuda" if settings.gpus else "cpu"))
        self.parts = find_parts(self.model)
        self.counters = Counters("extract")

    def ready(self) -> str:
        return this_node()

    def trial(self, unit: Unit, sample: int) -> None:
        """Capture one sample of a unit alone and throw it away: does it kill this actor?"""
        for _ in self.capture(Unit(unit.index, unit.split, unit.samples[sample : sample + 1])):
            pass

    def work(self, unit: Unit, without: frozenset[str] = frozenset()) -> UnitRecord:
        """Capture a unit into one attempt file; returns the record that would commit it."""
        began = time.monotonic()
        samples = self.capture(unit, without)
        record = write_shard(self.folder, unit, samples, self.facts.hidden_size, self.settings.state_dtype)
        self.counters.add(samples=record.rows, tokens=record.tokens, bytes=record.bytes)
        record.made_by |= {"device": str(self.model.device), "seconds": round(time.monotonic() - began, 3)}
        return record

    def capture(self, unit: Unit, without: frozenset[str] = frozenset()) -> Iterator[Sample]:
        """The samples of a unit with their states, one packed forward pass at a time."""
        dtype = STATE_DTYPES[self.settings.state_dtype][0]
        for pack in plan_packs([len(s.input_ids) for s in unit.samples], self.settings.tokens_per_batch):
            chosen = [unit.samples[i] for i in pack if unit.samples[i].sample_id not in without]
            if not chosen:
                continue
            inputs = [(list(s.input_ids), list(s.loss_mask)) for s in chosen]
            for sample, states in zip(
                chosen, capture_pack(self.parts, self.facts.aux_layers, inputs, dtype), strict=True
            ):
                if not (states.aux_TC.isfinite().all() and states.lse_S.isfinite().all()):
                    raise TargetError(
                        f"sample {sample.sample_id} ({sample.source_id}): the target's hidden states are NaN or infinite. "
                        "Use another target.dtype (bfloat16 instead of float16), or remove the conversation."
                    )
                yield Sample(
                    sample.sample_id,
                    sample.source_id,
                    torch.tensor(sample.input_ids, dtype=torch.int32),
                    torch.tensor(sample.loss_mask, dtype=torch.uint8),
                    states.aux_TC,
                    states.last_SH,
                    states.top1_S,
                    states.lse_S,
                )


def extract(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress) -> Outcome:
    """Capture every unit that is not committed yet."""
    settings = config.extract
    folder = run.of("extract")
    units, plan, cut = plan_dataset(config, run, facts)
    if cut:
        progress.say(f"extract: {cut} samples were cut to extract.max_length = {settings.max_length} tokens")
    if plan.rejected:
        progress.say(f"extract: {len(plan.rejected)} conversations left out, reasons in {folder.file('dataset.json')}")
    with DatasetWriter(folder, plan) as writer:
        waiting = [unit for unit in units if unit.index not in writer.records]
        total = sum(unit.tokens for unit in plan.units)
        left = sum(plan.units[unit.index].tokens for unit in waiting)
        progress.start("extract", total, "tokens", done=total - left)
        if waiting:
            ensure_resources({"CPU": settings.cpus, "GPU": settings.gpus}, settings.actors, config.ray.wait_s)
            pool = ActorPool(
                _actor_maker(config, facts, folder),
                settings.actors,
                "eagle-extract",
                samples=lambda unit: [sample.sample_id for sample in unit.samples],
            )
            rate = Rate(total)
            for _, record in pool.run(waiting):
                writer.commit(record)
                rate.advance(record.tokens)
                progress.advance(record.tokens, f"{rate.per_second:,.0f} tok/s")
            if pool.deaths:
                progress.say(f"extract: {pool.deaths} actors died and were replaced; nothing was lost")
        records = writer.records.values()
    return Outcome(samples=sum(r.rows for r in records), tokens=sum(r.tokens for r in records))


def plan_dataset(config: Config, run: RunFolder, facts: TargetFacts) -> tuple[list[Unit], DatasetPlan, int]:
    """The units, dataset.json, and how many samples were cut. Raises InputError when nothing is left to capture."""
    settings = config.extract
    samples, rejected, cut = tokenise(list(read_conversations(run.of("generate"))), settings.max_length)
    if not samples:
        raise InputError(f"{run.of('generate').path}: expected conversations with supervised tokens, found none.")
    units = plan_units(
        samples,
        unit_bytes=settings.unit_mib * 2**20,
        hidden_size=facts.hidden_size,
        state_bytes=STATE_DTYPES[settings.state_dtype][0].itemsize,
        seed=config.seed,
    )
    plan = DatasetPlan(
        aux_layers=facts.aux_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        state_dtype=settings.state_dtype,
        tokens_per_batch=settings.tokens_per_batch,
        seed=config.seed,
        target=facts.fingerprint,
        conversations=run.input_key("generate"),
        units=[
            UnitPlan(
                split=u.split, samples=[s.sample_id for s in u.samples], tokens=sum(len(s.input_ids) for s in u.samples)
            )
            for u in units
        ],
        rejected=rejected,
    )
    return units, plan, cut


def _actor_maker(config: Config, facts: TargetFacts, folder: Folder) -> Any:
    import ray

    settings = config.extract
    actor = ray.remote(Extractor)

    def make(name: str) -> Member:
        options = {
            "name": name,
            "num_cpus": settings.cpus,
            "num_gpus": settings.gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        return Member(actor.options(**options).remote(config.target, facts, settings, folder))

    return make
