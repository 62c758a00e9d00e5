"""What is wrong with a drafter's tensors: names, shapes and dtypes by the headers, and the vocabulary map.

SGLang skips unknown names and never notices missing ones (no lm_head: a random head, acceptance 1.00), so the key set is
held against what the config promises.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ray_eagle.drafter.files import (
    COPY_AGAIN,
    FLOAT_DTYPES,
    SAFETENSORS_DTYPES,
    StoredTensor,
    fault,
    read_arrays,
    read_headers,
    weight_files,
)
from ray_eagle.drafter.names import EMBEDDING, Naming, naming_of
from ray_eagle.drafter.speculators import UNUSED
from ray_eagle.drafter.variant import Variant
from ray_eagle.errors import CheckpointError

MAPS = frozenset({"d2t", "t2d"})


@dataclass(frozen=True)
class Contents:
    """The tensors of a drafter folder by SGLang's names."""

    folder: Path
    naming: Naming
    stored: dict[str, StoredTensor]
    """SGLang's name -> where it lies."""
    names: dict[str, str]
    """SGLang's name -> the name in the file."""
    twice: tuple[str, ...]
    """Names in the file that mean a tensor which is there under another name."""
    unused: tuple[str, ...] = ()
    """Copies of the target's tensors that speculators keeps beside."""

    @property
    def where(self) -> Path:
        """The file to name in messages."""
        return weight_files(self.folder)[0]


def read_contents(folder: Path, variant: Variant) -> Contents:
    """From the headers alone. Raises CheckpointError for missing, truncated or damaged files."""
    headers = read_headers(folder)
    naming = naming_of(headers, speculators=variant.format == "speculators")
    stored: dict[str, StoredTensor] = {}
    names: dict[str, str] = {}
    twice: list[str] = []
    unused = tuple(name for name in headers if variant.format == "speculators" and name in UNUSED)
    for name in sorted(headers):
        if name in unused:
            continue
        here = naming.here(name)
        if here in stored:
            twice.append(name)
            continue
        stored[here], names[here] = headers[name], name
    return Contents(folder, naming, stored, names, tuple(twice), unused)


def tensor_faults(variant: Variant, contents: Contents) -> Iterator[CheckpointError]:
    """Missing, unknown and doubled tensors, then wrong shapes, sizes and dtypes."""
    expected = dict(variant.tensors())
    stored, where = contents.stored, contents.where
    if EMBEDDING in stored:  # engines take the target's; some exports carry a copy
        expected[EMBEDDING] = (variant.shape.vocab_size, variant.shape.hidden_size)
    optional = _optional(variant, stored)
    missing = sorted(contents.naming.there(name) for name in expected.keys() - stored.keys() - optional)
    unknown = sorted(contents.names[name] for name in stored.keys() - expected.keys())
    if missing or unknown or contents.twice:
        found = f"missing {missing or 'none'}, unknown {unknown or 'none'}"
        yield fault(
            "drafter tensors",
            where=where,
            expected=f"exactly {len(expected.keys() - (optional - stored.keys()))} names",
            found=found + (f", more than once {sorted(contents.twice)}" if contents.twice else ""),
            fix="An engine would skip both silently and draft at random: export the drafter again.",
        )
    for name in sorted(expected.keys() & stored.keys()):
        yield from _tensor_faults(contents.names[name], name, stored[name], expected[name], where)


def _tensor_faults(
    shown: str, name: str, tensor: StoredTensor, expected: tuple[int, ...], where: Path
) -> Iterator[CheckpointError]:
    if tensor.shape != expected:
        fix = "config.json and weights are not of one drafter: take both from one export."
        yield fault(f"shape of {shown}", where=where, expected=list(expected), found=list(tensor.shape), fix=fix)
        return
    wanted = {"d2t": ("I64",), "t2d": ("BOOL",)}.get(name, FLOAT_DTYPES)
    if tensor.dtype not in wanted:
        fix = "Export the drafter again."
        if tensor.dtype.startswith("F8") or tensor.dtype in ("I8", "U8", "I32"):
            fix = "Quantised drafters are not read: export it in bfloat16, with d2t int64 and t2d bool."
        yield fault(f"dtype of {shown}", where=where, expected=" or ".join(wanted), found=tensor.dtype, fix=fix)
        return
    size = math.prod(expected) * SAFETENSORS_DTYPES[tensor.dtype]
    if tensor.bytes != size:
        what = f"{shown} in the safetensors header"
        yield fault(what, where=where, expected=f"{size} bytes", found=f"{tensor.bytes}", fix=COPY_AGAIN)


def _optional(variant: Variant, stored: dict[str, StoredTensor]) -> frozenset[str]:
    """Maps that may be absent: both where the drafter says every token, t2d wherever d2t tells the same."""
    if variant.shape.draft_vocab_size == variant.shape.vocab_size:
        return MAPS
    return frozenset({"t2d"}) if "d2t" in stored else frozenset()


def read_map(variant: Variant, contents: Contents) -> tuple[np.ndarray, np.ndarray]:
    """d2t [D] int64 and t2d [V] bool, what is absent made from the rest. Raises CheckpointError for ids out of range."""
    shape = variant.shape
    found = read_arrays({contents.names[name]: contents.stored[name] for name in MAPS & contents.stored.keys()})
    d2t = found.get(contents.names.get("d2t", ""))
    if d2t is None:
        d2t = np.zeros(shape.draft_vocab_size, dtype=np.int64)
    t2d = found.get(contents.names.get("t2d", ""))
    if t2d is None:
        ids = _ids(d2t, shape.vocab_size, contents.where)
        t2d = np.zeros(shape.vocab_size, dtype=np.bool_)
        t2d[ids] = True
    return d2t, t2d


def check_map(d2t_D: np.ndarray, t2d_V: np.ndarray, where: Path) -> None:
    """d2t holds distinct offsets that mark the same ids as t2d. Raises CheckpointError."""
    ids = _ids(d2t_D, len(t2d_V), where)
    marked: np.ndarray = np.zeros(len(t2d_V), dtype=np.bool_)
    marked[ids] = True
    if not np.array_equal(marked, t2d_V):
        raise map_fault(where, "two maps that disagree")
    if int(marked.sum()) < len(ids):
        raise map_fault(where, f"{len(ids) - int(marked.sum())} ids more than once")


def _ids(d2t_D: np.ndarray, vocab_size: int, where: Path) -> np.ndarray:
    ids = np.arange(len(d2t_D)) + d2t_D
    if ((ids < 0) | (ids >= vocab_size)).any():
        raise map_fault(where, "ids out of range")
    return ids


def map_fault(where: Path, found: str) -> CheckpointError:
    return fault(
        "vocabulary map",
        where=where,
        expected="d2t as offsets (target id - draft id) that mark the same ids as t2d",
        found=found,
        fix="Export the drafter again; absolute ids in d2t are a known fault of other tools.",
    )
