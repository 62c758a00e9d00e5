"""Predict acceptance from captured states: walk through an answer as the server does.

Averages over positions mislead, because a server visits a hard stretch more often than an easy one. On the target's own
greedy text the walk gives, pass by pass, what the float32 reference engine gives.
"""

from collections.abc import Sequence

import numpy as np

from ray_eagle.errors import InputError


def walk_answer(right_KT: np.ndarray, first: int, last: int) -> list[tuple[int, int]]:
    """The verify passes (t, accepted) of one answer x[first..last].

    `right_KT` [K, T] bool: the step-k draft at position t equals x[t+2+k]. The first pass starts at t = first - 1; a
    pass accepts the leading run of right drafts and goes on at t + accepted + 1. The pass whose chain would leave the
    answer (t + 1 + K > last) is dropped, as `complete_passes` does. Raises InputError when first < 1.
    """
    if first < 1:
        raise InputError(
            f"answer: expected a first index of at least 1, found {first}: no token before it to draft from."
        )
    steps = len(right_KT)
    run_T = np.logical_and.accumulate(right_KT, axis=0).sum(0)
    passes = []
    t = first - 1
    while t + 1 + steps <= last:
        accepted = int(run_T[t])
        passes.append((t, accepted))
        t += accepted + 1
    return passes


def answers_of(loss_mask: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """(first, last) index of each maximal run of supervised tokens."""
    padded = np.concatenate([[0], np.asarray(loss_mask, dtype=bool).astype(np.int8), [0]])
    edges = np.diff(padded)
    firsts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [(int(first), int(end) - 1) for first, end in zip(firsts, ends, strict=True)]
