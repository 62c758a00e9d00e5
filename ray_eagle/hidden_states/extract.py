"""Stage `extract`: plan the dataset, let actors capture every unit that is not committed, commit what they return."""

from ray_eagle.config import Config
from ray_eagle.conversations.conversation import read_conversations
from ray_eagle.errors import InputError, QuarantineError
from ray_eagle.hidden_states.actors import compute_dtype, make_pool
from ray_eagle.hidden_states.dataset import PLAN, DatasetWriter, read_plan
from ray_eagle.hidden_states.imported import find_norm
from ray_eagle.hidden_states.lending import borrowed, lent_rows
from ray_eagle.hidden_states.plan import (
    DatasetPlan,
    Quarantined,
    TokenSample,
    Unit,
    plan_units,
    set_aside_unreadable,
    tokenise,
)
from ray_eagle.progress import Progress, Rate
from ray_eagle.run import Folder, RunFolder
from ray_eagle.stage import Outcome
from ray_eagle.target.loading import TargetFacts

NAMED = 5
"""Quarantined samples named in a message; dataset.json and the records have all."""


def extract(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress) -> Outcome:
    """Capture every unit that is not committed yet.

    Raises QuarantineError at the end, with everything else committed, when samples had to be set aside.
    """
    settings = config.extract
    folder = run.of("extract")
    units, plan, cut = plan_dataset(config, run, facts)
    if cut:
        progress.say(f"extract: {cut} samples were cut to extract.max_length = {settings.max_length} tokens")
    if plan.rejected:
        progress.say(f"extract: {len(plan.rejected)} conversations left out, reasons in {folder.file(PLAN)}")
    with DatasetWriter(folder, plan) as writer:
        _borrow(units, writer, progress)
        waiting = [unit for unit in units if unit.index not in writer.records]
        total = sum(unit.tokens for unit in units)
        progress.start("extract", total, "tokens", done=total - sum(unit.tokens for unit in waiting))
        if waiting:
            _capture(config, facts, writer, waiting, progress)
        records = writer.records.values()
    aside = [*plan.quarantined, *(sample for record in records for sample in record.quarantined)]
    if aside:
        words = quarantine_message(aside, folder)
        if not config.allow_quarantine:
            raise QuarantineError(f"{words} To go on without them, add --allow-quarantine.")
        progress.say(words)
    return Outcome(samples=sum(len(r.rows) for r in records), tokens=sum(r.tokens for r in records))


def quarantine_message(aside: list[Quarantined], folder: Folder) -> str:
    named = "; ".join(f"{s.sample_id} ({s.source_id}): {s.reason}" for s in aside[:NAMED])
    more = f"; and {len(aside) - NAMED} more" if len(aside) > NAMED else ""
    return (
        f"extract: {len(aside)} samples were set aside, everything else is committed. {named}{more}. All are listed in "
        f"{folder.file(PLAN)} and the unit records."
    )


def plan_dataset(config: Config, run: RunFolder, facts: TargetFacts) -> tuple[list[Unit], DatasetPlan, int]:
    """The units, dataset.json, and how many samples were cut. Raises InputError when nothing is left to capture."""
    settings, folder = config.extract, run.of("extract")
    samples, rejected, cut = tokenise(read_conversations(run.of("generate")), settings.max_length)
    samples, unreadable = set_aside_unreadable(samples, facts.max_position_embeddings, facts.vocab_size)
    if not samples and not unreadable:
        raise InputError(f"{run.of('generate').path}: expected conversations with supervised tokens, found none.")
    plan = DatasetPlan(
        aux_layers=facts.aux_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        state_dtype=settings.state_dtype,
        compute_dtype=compute_dtype(config),
        attention=config.target.attention,
        tokens_per_batch=settings.tokens_per_batch,
        seed=config.seed,
        target=facts.fingerprint,
        conversations=run.input_key("generate"),
        units=[],
        rejected=rejected,
        quarantined=unreadable,
    )
    if folder.exists(PLAN):  # what was borrowed then stays borrowed, whatever the lenders hold by now
        lent = {name: unit.lender for unit in read_plan(folder).units if unit.lender for name in unit.samples}
    else:
        lent = lent_rows(settings.share, plan)
    units = units_of(samples, config, facts, lent)
    return units, plan.model_copy(update={"units": [unit.planned for unit in units]}), cut


def units_of(
    samples: list[TokenSample], config: Config, facts: TargetFacts, lent: dict[str, str] | None = None
) -> list[Unit]:
    return plan_units(
        samples,
        unit_bytes=config.extract.unit_mib * 2**20,
        hidden_size=facts.hidden_size,
        state_dtype=config.extract.state_dtype,
        seed=config.seed,
        lent=lent,
    )


def _borrow(units: list[Unit], writer: DatasetWriter, progress: Progress) -> None:
    lent = [unit for unit in units if unit.lender and unit.index not in writer.records]
    for unit in lent:
        writer.commit(borrowed(unit))
    if lent:
        progress.say(f"extract: {sum(len(unit.samples) for unit in lent)} samples are borrowed, not captured again")


def _capture(
    config: Config, facts: TargetFacts, writer: DatasetWriter, waiting: list[Unit], progress: Progress
) -> None:
    norm = None
    if config.states.path:
        norm, told = find_norm(config, facts, waiting[0].samples)
        progress.say(
            f"extract: importing {config.states.path}; its last states were taken {norm} the final norm ({told})"
        )
    pool = make_pool(config, facts, writer.folder, norm)
    rate = Rate(sum(unit.tokens for unit in waiting))
    for unit, record in pool.run(waiting):
        record.quarantined += [
            Quarantined(sample_id=s.sample_id, source_id=s.source_id, reason=pool.quarantined[s.sample_id])
            for s in unit.samples
            if s.sample_id in pool.quarantined
        ]
        writer.commit(record, disturbed=pool.retries > 0)
        rate.advance(unit.tokens)
        progress.advance(unit.tokens, f"{rate.per_second:,.0f} tok/s")
    if pool.deaths:
        progress.say(f"extract: {pool.deaths} actors died and were replaced; nothing was lost")
