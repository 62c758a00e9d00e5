"""Near-duplicates among many texts: sets of character 5-grams as sorted hashes, in arrays that Ray tasks share.

Equals `prompts.ShingleIndex`, at 12 bytes a character instead of a hundred.
"""

from dataclasses import dataclass

import numpy as np

from ray_eagle.conversations.prompts import SHINGLE

FACTOR = np.uint64(0x9E3779B97F4A7C15)


def hashed_shingles(text: str, size: int = SHINGLE) -> np.ndarray:
    """`prompts.shingles` as sorted uint64 hashes (two of 2^64 equal by chance: never, in practice)."""
    folded = " ".join(text.casefold().split())
    codes = np.frombuffer(folded.encode("utf-32-le"), dtype="<u4").astype(np.uint64)
    width = min(size, len(codes))
    hashes: np.ndarray = np.full(max(1, len(codes) - size + 1), width, dtype=np.uint64)
    for i in range(width):
        hashes = hashes * FACTOR + codes[i : i + len(hashes)]
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes)


@dataclass(frozen=True)
class HashIndex:
    """Many sets of hashes, by hash."""

    hashes: np.ndarray
    """Sorted, with repeats."""
    owners: np.ndarray
    """uint32: the set that each belongs to."""
    sizes: np.ndarray
    """Of each set."""

    @classmethod
    def of(cls, sets: list[np.ndarray]) -> "HashIndex":
        sizes = np.array([len(one) for one in sets], dtype=np.int64)
        hashes = np.concatenate(sets) if sets else np.empty(0, dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        owners: np.ndarray = np.repeat(np.arange(len(sets), dtype=np.uint32), sizes)
        return cls(hashes[order], owners[order], sizes)

    def near(self, one: np.ndarray, least: float) -> list[int]:
        """Which sets have a Jaccard similarity of at least `least` with this one."""
        left = np.searchsorted(self.hashes, one, "left")
        counts = np.searchsorted(self.hashes, one, "right") - left
        total = int(counts.sum())
        if not total:
            return []
        steps = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        found, shared = np.unique(self.owners[np.repeat(left, counts) + steps], return_counts=True)
        return [int(i) for i in found[shared / (len(one) + self.sizes[found] - shared) >= least]]


def close_to_trained(held_out: list[np.ndarray], near_training: set[int], least: float) -> set[int]:
    """Held-out texts that must be trained on: those near training texts, those near these in turn, and so on."""
    index = HashIndex.of(held_out)
    moved, fresh = set(near_training), set(near_training)
    while fresh:
        fresh = {j for i in fresh for j in index.near(held_out[i], least)} - moved
        moved |= fresh
    return moved
