"""Stage `generate` with `answers: keep`: whole conversations become token ids with a mask, in Ray tasks over chunks of rows.

The driver reads the input three times, chunk by chunk, and never holds it: to number the rows and find repeated ids, to find
held-out rows close to trained ones, and to tokenise. It keeps about 100 bytes a row, and 16 a character of what users say in
held-out rows. Chunk N becomes part-N, written in order; a killed run makes the missing parts, the same bytes.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_eagle.cluster import connect, ensure_resources
from ray_eagle.config import Config, GenerateConfig, TargetConfig
from ray_eagle.conversations.conversation import Conversation, part_name
from ray_eagle.conversations.inputs import Chunk, read_chunks, shape_of
from ray_eagle.conversations.mask import Renderer
from ray_eagle.conversations.messages import RowError, Shape, own_id
from ray_eagle.conversations.prompts import Split, hashed_split, refuse_all, usable_row
from ray_eagle.conversations.similarity import HashIndex, close_to_trained, hashed_shingles
from ray_eagle.conversations.template import stop_ids
from ray_eagle.errors import EagleError, WorkerError
from ray_eagle.progress import Progress, Rate
from ray_eagle.run import Folder
from ray_eagle.target.loading import TargetFacts, load_tokenizer

IN_FLIGHT = 64
Rejected = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """A usable row, as the first reading keeps it."""

    number: int
    id: str
    split: Split
    held_out: np.ndarray | None
    """Hashed shingles of a held-out row."""


@dataclass
class Survey:
    """What the first two readings find."""

    rows: int = 0
    repeats: dict[int, int] = field(default_factory=dict)
    """Row -> the row that has its id already."""
    moved: frozenset[int] = frozenset()
    """Held-out rows that are trained on instead."""


def keep_answers(config: Config, folder: Folder, facts: TargetFacts, progress: Progress) -> None:
    """Write part-NNNNN.jsonl, one a chunk, and rejected.jsonl. Raises InputError when no row can be used."""
    settings = config.generate
    source, shape = settings.prompts, shape_of(settings.prompts, settings.shape)
    connect(config.ray)
    ensure_resources({"CPU": settings.cpus}, 1, config.ray.wait_s)
    survey = survey_rows(source, shape, settings)
    done = set(folder.names())
    progress.start("generate", survey.rows, "rows")

    def missing() -> Iterator[tuple[Chunk, dict[int, int], frozenset[int]]]:
        for chunk in read_chunks(source, settings.limit):
            if {part_name(chunk.index), _rejected_name(chunk.index)} <= done:
                progress.advance(len(chunk.numbers))
                continue
            repeats = {n: survey.repeats[n] for n in chunk.numbers if n in survey.repeats}
            yield chunk, repeats, survey.moved.intersection(chunk.numbers)

    rate = Rate(1)
    for index, numbers, rows, rejected in _in_order(
        tokenise_chunk, missing(), settings.cpus, shape, config.target, facts, settings
    ):
        folder.write_jsonl(_rejected_name(index), rejected)
        folder.write_jsonl(part_name(index), rows)
        rate.advance(sum(len(row["input_ids"]) for row in rows))
        progress.advance(numbers, f"{rate.per_second:,.0f} tok/s")
    names = [name for name in folder.names() if name.startswith("rejected-")]
    folder.write_bytes("rejected.jsonl", b"".join(folder.read_bytes(name) for name in names))
    if not any(folder.read_bytes(part_name(i)) for i in range(len(names))):
        refuse_all(source, folder.read_jsonl("rejected.jsonl"))
    for name in names:
        folder.delete_file(name)


def survey_rows(source: str, shape: Shape, settings: GenerateConfig) -> Survey:
    """Read everything once, and twice when rows are held out. The splits are those of `prompts.load_prompts`."""
    found = Survey()
    first: dict[str, int] = {}
    held_out: dict[int, np.ndarray] = {}
    chunks = read_chunks(source, settings.limit)
    for count, seen in _in_order(survey_chunk, ((chunk,) for chunk in chunks), settings.cpus, shape, settings):
        found.rows += count
        for row in seen:
            number = first.setdefault(row.id, row.number)
            if number != row.number:
                found.repeats[row.number] = number
            elif row.held_out is not None:
                held_out[row.number] = row.held_out
    if held_out:
        import ray

        numbers, sets = list(held_out), list(held_out.values())
        index = ray.put(HashIndex.of(sets))
        chunks = read_chunks(source, settings.limit)
        with_repeats = ((chunk, set(chunk.numbers).intersection(found.repeats)) for chunk in chunks)
        near: set[int] = set()
        for some in _in_order(near_chunk, with_repeats, settings.cpus, shape, settings, index):
            near |= some
        moved = close_to_trained(sets, near, settings.near_duplicate)
        found.moved = frozenset(numbers[i] for i in moved)
    return found


def survey_chunk(chunk: Chunk, shape: Shape, settings: GenerateConfig) -> tuple[int, list[Seen]]:
    """How many rows there are, and those that can be used."""
    seen = []
    for number, raw in chunk.rows():
        try:
            row = usable_row(raw, shape, settings)
        except RowError:
            continue  # told when it is tokenised
        split = hashed_split(row.id, settings.held_out_share, settings.validation_share)
        seen.append(Seen(number, row.id, split, hashed_shingles(row.user_text) if split == "held_out" else None))
    return len(chunk.numbers), seen


def near_chunk(
    chunk: Chunk, repeats: set[int], shape: Shape, settings: GenerateConfig, held_out: HashIndex
) -> set[int]:
    """Which held-out texts are close to a row of this chunk that is not held out."""
    near: set[int] = set()
    for number, raw in chunk.rows():
        try:
            row = usable_row(raw, shape, settings)
        except RowError:
            continue
        split = hashed_split(row.id, settings.held_out_share, settings.validation_share)
        if split != "held_out" and number not in repeats:
            near.update(held_out.near(hashed_shingles(row.user_text), settings.near_duplicate))
    return near


def tokenise_chunk(
    chunk: Chunk,
    repeats: dict[int, int],
    moved: frozenset[int],
    shape: Shape,
    target: TargetConfig,
    facts: TargetFacts,
    settings: GenerateConfig,
) -> tuple[int, int, list[dict[str, Any]], list[Rejected]]:
    """The chunk's index, how many rows it has, its conversations, and its rejected rows. Each row is in one of the two."""
    renderer = _renderer(target, facts, settings)
    kept: list[dict[str, Any]] = []
    rejected: list[Rejected] = []
    for number, raw in chunk.rows():
        name = own_id(raw)
        try:
            row = usable_row(raw, shape, settings)
            name = row.id
            if number in repeats:
                raise RowError(f"same id as row {repeats[number]}")
            split = hashed_split(row.id, settings.held_out_share, settings.validation_share)
            split = "train" if number in moved else split
            made = conversations_of(renderer, row.messages, row.tools, settings, facts.max_position_embeddings)
            for suffix, values in made:
                conversation = Conversation(row.id + suffix, row.category, split, row=number, **values)
                kept.append(conversation.to_row())
        except RowError as error:
            rejected.append({"row": number, "source_id": name, "reason": str(error)})
    return chunk.index, len(chunk.numbers), kept, rejected


def conversations_of(
    renderer: Renderer,
    messages: list[Any],
    tools: list[Any],
    settings: GenerateConfig,
    context: int,
    cut: frozenset[int] = frozenset(),
) -> Iterable[tuple[str, dict[str, Any]]]:
    """Suffix of the id and the fields of each conversation that a row gives. Raises RowError when it gives none.

    `cut`: numbers of the messages that the target did not end itself.
    """
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    left_out = len(messages) - 1 - last
    note = f"{left_out} messages after the last answer left out" if left_out else ""
    samples = renderer.samples(
        messages[: last + 1],
        tools,
        turns=settings.turns,
        reasoning=settings.reasoning,
        supervise_reasoning=settings.supervise_reasoning,
        cut=cut,
    )
    made = []
    for sample in samples:
        if len(sample.input_ids) > context:
            longer = f"turn {sample.turn}: {len(sample.input_ids)} tokens, beyond the target's context of {context}"
            if len(samples) == 1:
                raise RowError(longer)
            note = longer
            continue
        values = {
            "messages": sample.messages,
            "input_ids": sample.input_ids,
            "supervised": sample.supervised,
            "finish_reasons": [
                "length" if was_cut else "stop" if ended else "none"
                for ended, was_cut in zip(sample.ended, sample.cut, strict=True)
            ],
            "mask": sample.method,
        }
        made.append(("" if sample is samples[0] else f"#turn{sample.turn}", values))
    if not made:
        raise RowError(note)
    made[0][1]["note"] = note
    return made


_RENDERERS: dict[str, Renderer] = {}


def _renderer(target: TargetConfig, facts: TargetFacts, settings: GenerateConfig) -> Renderer:
    """One a process: made inside the worker, so no tokenizer's threads ever see a fork."""
    key = f"{facts.path} {sorted(facts.fingerprint.items())} {settings.reasoning_marks}"
    if key not in _RENDERERS:
        tokenizer = load_tokenizer(facts, target)
        _RENDERERS[key] = Renderer(tokenizer, stop_ids(facts.path, tokenizer), settings.reasoning_marks)
    return _RENDERERS[key]


def _in_order(function: Any, items: Iterator[tuple[Any, ...]], cpus: float, *others: Any) -> Iterator[Any]:
    """`function(*item, *others)` as Ray tasks, a bounded number at a time, the results in the order of the items.

    Raises an EagleError of a task as it is, and WorkerError for any other failure.
    """
    import ray
    from ray.exceptions import RayError

    task = ray.remote(function).options(num_cpus=cpus)
    shared = [other if isinstance(other, ray.ObjectRef) else ray.put(other) for other in others]
    at_once = min(IN_FLIGHT, 2 * max(1, int(ray.cluster_resources().get("CPU", 1) / cpus)))
    running: deque[Any] = deque()
    try:
        for item in items:
            running.append(task.remote(*item, *shared))
            if len(running) >= at_once:
                yield ray.get(running.popleft())
        while running:
            yield ray.get(running.popleft())
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EagleError):
            raise cause from None
        raise WorkerError(
            f"generate: a Ray task over rows failed ({' '.join(str(error).split())[:500]}). What was committed is kept: run it "
            "again, with more generate.cpus a task if memory ran out."
        ) from error
    finally:
        for reference in running:
            ray.cancel(reference)


def _rejected_name(chunk: int) -> str:
    return f"rejected-{chunk:05d}.jsonl"
