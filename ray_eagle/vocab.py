"""Stage `vocab`: which target tokens the drafter may say, from the token counts in the dataset's records.

Map convention (SGLang): d2t[i] = target id - i, an offset, int64; t2d[v] marks the target ids in the map.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from ray_eagle.config import Config
from ray_eagle.errors import InputError
from ray_eagle.hidden_states.dataset import read_plan, read_records
from ray_eagle.hidden_states.reader import HiddenStates
from ray_eagle.progress import Progress
from ray_eagle.run import Folder, RunFolder
from ray_eagle.stage import Outcome
from ray_eagle.target.loading import TargetFacts, load_tokenizer

MAP = "vocab.safetensors"


def choose_tokens(counts_V: np.ndarray, size: int, always: list[int]) -> np.ndarray:
    """[D] int64 target ids, ascending: `always`, then the most frequent (ties: lower id), then the lowest unused ids.

    counts_V: how often each target token is supervised. D = min(size, V).
    """
    size = min(size, len(counts_V))
    priority = np.where(counts_V > 0, counts_V.astype(np.int64), 0)
    priority[np.asarray(always, dtype=np.int64)] = np.iinfo(np.int64).max
    order = np.argsort(-priority, kind="stable")
    return np.sort(order[:size]).astype(np.int64)


def to_map(ids_D: np.ndarray, vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t [D] int64 offsets and t2d [V] bool."""
    ids = torch.from_numpy(ids_D)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d


def coverage(counts_V: np.ndarray, ids_D: np.ndarray) -> float:
    """Share of counted tokens that lie in the map."""
    total = counts_V.sum()
    return float(counts_V[ids_D].sum() / total) if total else 0.0


def read_map(folder: Folder) -> tuple[Tensor, Tensor]:
    """d2t and t2d of a finished `vocab` stage."""
    tensors = load(folder.read_bytes(MAP))
    return tensors["d2t"], tensors["t2d"]


def vocab(config: Config, run: RunFolder, facts: TargetFacts, progress: Progress) -> Outcome:
    """Write vocab.safetensors (d2t, t2d) and vocab.json (coverage for several sizes, teacher ceiling)."""
    folder, states = run.of("vocab"), run.of("extract")
    counts_V = supervised_counts(states, facts.vocab_size)
    top1_V = teacher_counts(states, facts.vocab_size)
    tokenizer = load_tokenizer(facts, config.target)
    special = [int(i) for i in tokenizer.all_special_ids if i < facts.vocab_size]
    always = [i for i in special if counts_V[i] or i == tokenizer.eos_token_id]
    given = given_map(config, facts)
    ids_D = choose_tokens(counts_V, config.vocab.size, always) if given is None else given
    d2t, t2d = to_map(ids_D, facts.vocab_size)
    folder.write_bytes(MAP, save({"d2t": d2t, "t2d": t2d}))
    sizes = sorted({n for n in config.vocab.report_sizes if n < facts.vocab_size} | {len(ids_D)})
    table = [
        {
            "size": size,
            "coverage": round(coverage(counts_V, ids), 6),
            "teacher_ceiling": round(coverage(top1_V, ids), 6),
        }
        for size in sizes
        for ids in [ids_D if size == len(ids_D) else choose_tokens(counts_V, size, always)]
    ]
    chosen = next(row for row in table if row["size"] == len(ids_D))
    facts_out: dict[str, Any] = {
        "size": len(ids_D),
        "source": "given drafter" if given is not None else "supervised tokens of the training split",
        "distinct_supervised_tokens": int((counts_V > 0).sum()),
        "supervised_tokens": int(counts_V.sum()),
        "always_kept": always,
        "table": table,
    }
    folder.write_json("vocab.json", facts_out)
    progress.say(
        f"vocab: {len(ids_D):,} of {facts.vocab_size:,} tokens cover {chosen['coverage']:.2%} of supervised tokens; "
        f"the teacher's first choice lies inside at {chosen['teacher_ceiling']:.2%} of positions"
    )
    return Outcome(samples=len(ids_D), tokens=int(counts_V.sum()), facts=chosen)


def given_map(config: Config, facts: TargetFacts) -> np.ndarray | None:
    """The target ids [D] of a drafter to fine-tune, whose map is kept: its head rows belong to it.

    None without such a drafter, and when `vocab.keep_given` is off: training then moves its rows to the new map. Raises
    CheckpointError when it is damaged or made for another target.
    """
    if not config.drafter.path:
        return None
    from ray_eagle.drafter.checkpoint import check_fits, load_drafter

    path = Path(config.drafter.path).expanduser()
    drafter = load_drafter(path)
    check_fits(
        drafter.shape, hidden_size=facts.hidden_size, vocab_size=facts.vocab_size, layers=facts.layers, where=path
    )
    return drafter.target_ids.numpy() if config.vocab.keep_given else None


def supervised_counts(folder: Folder, vocab_size: int) -> np.ndarray:
    """[V] int64 counts of supervised tokens of the training split, summed over its records."""
    plan = read_plan(folder)
    counts_V: np.ndarray = np.zeros(vocab_size, np.int64)
    for index, record in read_records(folder, plan).items():
        if plan.units[index].split == "train":
            counts_V[np.array(record.token_ids, np.int64)] += np.array(
                record.token_counts, np.int64
            )  # both may be empty
    if not counts_V.any():
        raise InputError(f"{folder.path}: expected supervised tokens in the training split, found none. Add prompts.")
    return counts_V


def teacher_counts(folder: Folder, vocab_size: int) -> np.ndarray:
    """[V] int64 counts of the teacher's first choice over the training split."""
    counts: Counter[int] = Counter()
    for sample in HiddenStates(folder, "train"):
        counts.update(sample.top1.tolist())
    counts_V: np.ndarray = np.zeros(vocab_size, np.int64)
    counts_V[list(counts)] = list(counts.values())
    return counts_V
