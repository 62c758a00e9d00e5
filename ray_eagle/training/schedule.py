"""What is trained when: packs of every epoch, planned for all workers at once, and the learning rate of every step."""

import math
import random

from ray_eagle.hidden_states.plan import plan_packs

SORTED_WINDOW = 32
"""Samples sorted by length together: documents of a pack are alike, so little of the attention grid is empty."""


def epoch_packs(lengths: list[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Sample indices of each pack of one epoch: every sample once, shuffled by (seed, epoch)."""
    shuffler = random.Random(f"{seed} {epoch}")
    order = list(range(len(lengths)))
    shuffler.shuffle(order)
    order = [
        index
        for start in range(0, len(order), SORTED_WINDOW)
        for index in sorted(order[start : start + SORTED_WINDOW], key=lambda i: lengths[i])
    ]
    packs = [[order[i] for i in pack] for pack in plan_packs([lengths[i] for i in order], budget)]
    shuffler.shuffle(packs)
    return packs


def epoch_steps(lengths: list[int], budget: int, packs_per_step: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """Packs of each optimizer step of one epoch; the last step may have fewer."""
    packs = epoch_packs(lengths, budget, seed, epoch)
    return [packs[i : i + packs_per_step] for i in range(0, len(packs), packs_per_step)]


def learning_rate(step: int, total: int, *, peak: float, floor: float, warmup_share: float) -> float:
    """Linear warm-up over `warmup_share` of all steps, then a cosine from the peak to floor * peak."""
    warmup = max(1, round(warmup_share * total))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
