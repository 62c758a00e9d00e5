"""How much of the answers is a loop. A target that repeats itself is easy to draft for, and acceptance reads high."""

from collections.abc import Sequence

import numpy as np

NGRAM = 8


def repeated_positions(tokens: Sequence[int], n: int = NGRAM) -> np.ndarray:
    """[len(tokens)] bool: the n-gram that ends at this position occurred earlier in the same answer."""
    flags: np.ndarray = np.zeros(len(tokens), dtype=bool)
    seen: set[tuple[int, ...]] = set()
    for end in range(n - 1, len(tokens)):
        gram = tuple(tokens[end - n + 1 : end + 1])
        flags[end] = gram in seen
        seen.add(gram)
    return flags


def repeated_ngram_share(answers: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """Share of all n-grams, pooled over the answers, that occurred earlier in their own answer; 0 without n-grams."""
    total = sum(max(0, len(tokens) - n + 1) for tokens in answers)
    repeated = sum(int(repeated_positions(tokens, n).sum()) for tokens in answers)
    return repeated / total if total else 0.0


def passes_without_repeats(
    tokens: Sequence[int], prompt_length: int, starts: Sequence[int], accepted: Sequence[int], n: int = NGRAM
) -> list[int]:
    """The accepted counts of the passes whose drafted window starts outside a loop.

    A pass that starts at t drafts x[t+2] first; it is dropped when the n-gram that ends at x[t+2] occurred earlier in
    the answer `tokens` (whose first token has index `prompt_length`). Passes of unknown start (-1) are left out.
    """
    flags = repeated_positions(tokens, n)
    return [j for start, j in zip(starts, accepted, strict=True) if start >= 0 and not flags[start + 2 - prompt_length]]
