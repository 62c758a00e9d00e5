"""Near-duplicates among many texts: sets of character 5-grams as sorted hashes, in arrays that Ray tasks share.

Held-out texts alone are indexed, at 16 bytes a character; training texts, of which there may be any number, stream by.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

SHINGLE = 5
"""Characters of an n-gram by which texts are compared."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
MIX = (
    (30, 0xBF58476D1CE4E5B9),
    (27, 0x94D049BB133111EB),
)  # of SplitMix64: the high bits must depend on every character


def hashed_shingles(text: str, size: int = SHINGLE) -> np.ndarray:
    """The set of character n-grams of the case-folded text with single spaces, as sorted uint64 hashes.

    Two n-grams have equal hashes by chance: never, in practice.
    """
    folded = " ".join(text.casefold().split())
    codes = np.frombuffer(folded.encode("utf-32-le"), dtype="<u4").astype(np.uint64)
    width = min(size, len(codes))
    hashes: np.ndarray = np.full(max(1, len(codes) - size + 1), width, dtype=np.uint64)
    for i in range(width):
        hashes = hashes * FACTOR + codes[i : i + len(hashes)]
        hashes ^= hashes >> np.uint64(29)
    for shift, factor in MIX:
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    return np.unique(hashes)


@dataclass(frozen=True)
class HashIndex:
    """Many sets of hashes, by hash."""

    keys: np.ndarray
    """uint64, sorted: a hash, its low `bits` replaced by the number of the set that it belongs to."""
    sizes: np.ndarray
    """Of each set."""
    bits: int

    @classmethod
    def of(cls, sets: list[np.ndarray]) -> "HashIndex":
        bits = max(1, (len(sets) - 1).bit_length())
        sizes = np.array([len(one) for one in sets], dtype=np.int64)
        keys: np.ndarray = np.empty(int(sizes.sum()), dtype=np.uint64)
        end = 0
        for owner, one in enumerate(sets):
            keys[end : end + len(one)] = _without(one, bits) | np.uint64(owner)
            end += len(one)
        keys.sort()  # in place: these may be most of what the driver holds
        return cls(keys, sizes, bits)

    def near(self, one: np.ndarray, least: float) -> list[int]:
        """Which sets have a Jaccard similarity of at least `least` with this one."""
        low = np.uint64((1 << self.bits) - 1)
        wanted = _without(one, self.bits)
        left = np.searchsorted(self.keys, wanted, "left")
        counts = np.searchsorted(self.keys, wanted | low, "right") - left
        total = int(counts.sum())
        if not total:
            return []
        steps = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        owners = (self.keys[np.repeat(left, counts) + steps] & low).astype(np.int64)
        found, shared = np.unique(owners, return_counts=True)
        return [int(i) for i in found[shared / (len(one) + self.sizes[found] - shared) >= least]]


def _without(hashes: np.ndarray, bits: int) -> np.ndarray:
    return hashes & ~np.uint64((1 << bits) - 1)


def near_any(index: HashIndex, texts: Iterable[str], least: float) -> set[int]:
    """Which sets of the index are near any of these texts."""
    found: set[int] = set()
    if index.sizes.size:
        for text in texts:
            found.update(index.near(hashed_shingles(text), least))
    return found


def close_to_trained(held_out: list[np.ndarray], near_training: set[int], least: float) -> set[int]:
    """Held-out texts that must be trained on: those near training texts, those near these in turn, and so on."""
    index = HashIndex.of(held_out)
    moved, fresh = set(near_training), set(near_training)
    while fresh:
        fresh = {j for i in fresh for j in index.near(held_out[i], least)} - moved
        moved |= fresh
    return moved
