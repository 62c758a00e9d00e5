"""Predict acceptance without a server: walk over captured states as a server would draft and verify.

It needs the dataset, the target's head rows and any drafter folder. High here and low served means that the engine is at
fault; low here means that the drafter is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ray_eagle.drafter.model import Drafter
from ray_eagle.hidden_states.schema import Sample
from ray_eagle.probing.walk import answers_of, walk_answer
from ray_eagle.target.logits import UNCHANGED, LogitRule
from ray_eagle.training.losses import Objective
from ray_eagle.training.packing import make_pack
from ray_eagle.training.unroll import score_steps
from ray_eagle.training.weights import Weights


@dataclass(frozen=True)
class SamplePrediction:
    """What the drafter gets right in one conversation."""

    source_id: str
    starts: list[int]
    """Index t of each predicted verify pass."""
    accepted: list[int]
    """Right drafts of each, at most K."""
    right_K: list[int]
    """Positions that count at each step where the drafter's choice is the teacher's,"""
    counted_K: list[int]
    """and all that count."""
    outside_K: list[int]
    """... of them, where the teacher's choice lies outside the draft vocabulary."""
    loss_sums_K: list[float]
    entering_K: list[int]


@torch.no_grad()
def predict(
    drafter: Drafter,
    samples: Iterable[Sample],
    embedding_VH: Tensor,
    draft_head_DH: Tensor,
    steps: int,
    *,
    first_answer: int | None = None,
    progress: Callable[[], None] = lambda: None,
    weights: Weights | None = None,
    logits: LogitRule = UNCHANGED,
) -> list[SamplePrediction]:
    """Walk the answers of each sample with `steps` draft tokens a pass, computed in the dtype of `embedding_VH`.

    Tensors must be on the drafter's device. `weights`: the drafter's, when they exist already. `logits`: what the target
    does to its head's output; losses alone depend on it.

    `first_answer`: walk only so many tokens of the first answer, as a probe with that many new tokens does.
    """
    predictions = []
    weights = weights or Weights(drafter, embedding_VH.dtype)
    for sample in samples:
        pack = make_pack([sample], steps).to(embedding_VH.device, embedding_VH.dtype)
        right_KT: np.ndarray = np.zeros((steps, len(sample.input_ids)), dtype=bool)
        rows: list[tuple[int, int, int, float, int]] = []
        for k, scores in enumerate(score_steps(weights, pack, embedding_VH, draft_head_DH, Objective(logits=logits))):
            right_KT[k, scores.at_N.cpu().numpy()] = scores.right_N.cpu().numpy()
            entering = int(scores.enters_N.sum())
            loss = float(scores.losses_N[scores.enters_N].sum())
            rows.append((int(scores.right_N.sum()), len(scores.at_N), len(scores.at_N) - entering, loss, entering))
        answers = [(first, last) for first, last in answers_of(sample.loss_mask.tolist()) if first]
        if first_answer is not None:
            answers = [(first, min(last, first + first_answer - 1)) for first, last in answers[:1]]
        passes = [one for first, last in answers for one in walk_answer(right_KT, first, last)]
        right, counted, outside, losses, entered = (list(column) for column in zip(*rows, strict=True))
        predictions.append(
            SamplePrediction(
                sample.source_id,
                [t for t, _ in passes],
                [j for _, j in passes],
                right,
                counted,
                outside,
                losses,
                entered,
            )
        )
        progress()
    return predictions


def predicted_length(predictions: list[SamplePrediction]) -> float:
    """Acceptance length pooled over all predicted passes; nan without one."""
    accepted = [j for prediction in predictions for j in prediction.accepted]
    return 1 + sum(accepted) / len(accepted) if accepted else float("nan")
