"""The slow, obvious twin of unrolled training: float64 loops over documents, steps and positions (EAGLE3.md, section 3)."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_eagle.drafter.model import Drafter
from ray_eagle.hidden_states.schema import Sample


@dataclass
class SlowResult:
    logits: dict[tuple[int, int, int], Tensor]
    """(document, step, t) -> [D], wherever token t+1+step exists."""
    losses: dict[tuple[int, int, int], Tensor]
    """... of positions that count and whose teacher choice is in the draft vocabulary."""
    right: dict[tuple[int, int, int], bool]
    """... of positions that count."""

    def step_losses(self, steps: int) -> list[Tensor]:
        means = []
        for k in range(steps):
            values = [v for (_, step, _), v in self.losses.items() if step == k]
            means.append(torch.stack(values).mean() if values else torch.zeros((), dtype=torch.float64))
        return means

    def total(self, steps: int, decay: float) -> Tensor:
        weighted = sum(decay**k * loss for k, loss in enumerate(self.step_losses(steps)))
        return weighted / sum(decay**k for k in range(steps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x_E: Tensor, position: int, theta: float) -> Tensor:
    half = len(x_E) // 2
    out = []
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_E))
        out.append(x_E[i] * math.cos(angle) - x_E[i + half] * math.sin(angle))
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_E))
        out.append(x_E[i + half] * math.cos(angle) + x_E[i] * math.sin(angle))
    return torch.stack(out)


def counts(mask: list[int], t: int, k: int) -> bool:
    """Tokens t+1 .. t+2+k exist and are all the assistant's."""
    return t + 2 + k < len(mask) and all(mask[t + 1 + i] for i in range(k + 2))


def slow_unroll(
    drafter: Drafter, samples: list[Sample], embedding: Tensor, head: Tensor, steps: int, theta: float
) -> SlowResult:
    """`drafter` must be float64; `embedding` and `head` are the target's, [V, H] float64."""
    shape, layer = drafter.shape, drafter.midlayer
    attn, eps = layer.self_attn, shape.rms_norm_eps
    group = shape.num_attention_heads // shape.num_key_value_heads
    ids = [i + int(d) for i, d in enumerate(drafter.d2t)]
    result = SlowResult({}, {}, {})
    for number, sample in enumerate(samples):
        tokens, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        teaching = [s for s in range(len(mask) - 1) if mask[s + 1]]
        aux, last = sample.aux_states(torch.float64), sample.last.double()
        hidden = {t: drafter.fc.weight @ aux[t] for t in range(len(tokens))}
        base_keys: dict[int, tuple[Tensor, Tensor]] = {}
        own: dict[int, list[tuple[Tensor, Tensor]]] = {t: [] for t in range(len(tokens))}
        for k in range(steps):
            defined = [t for t in range(len(tokens)) if t + 1 + k < len(tokens)]
            inputs = {}
            for t in defined:
                e = rms_norm(embedding[tokens[t + 1 + k]], layer.input_layernorm.weight, eps)
                g = rms_norm(hidden[t], layer.hidden_norm.weight, eps)
                inputs[t] = torch.cat([e, g])
                key = (attn.k_proj.weight @ inputs[t]).view(shape.num_key_value_heads, shape.head_dim)
                value = (attn.v_proj.weight @ inputs[t]).view(shape.num_key_value_heads, shape.head_dim)
                rotated = torch.stack([rotate(x, t + k, theta) for x in key])
                if k == 0:
                    base_keys[t] = (rotated, value)
                else:
                    own[t].append((rotated, value))
            following = {}
            for t in defined:
                seen = [base_keys[j] for j in range(t + 1)] + own[t]
                query = (attn.q_proj.weight @ inputs[t]).view(shape.num_attention_heads, shape.head_dim)
                heads = []
                for a in range(shape.num_attention_heads):
                    q = rotate(query[a], t + k, theta)
                    scores = torch.stack([q @ key[a // group] for key, _ in seen]) / math.sqrt(shape.head_dim)
                    weights = torch.softmax(scores, 0)
                    heads.append(sum(w * value[a // group] for w, (_, value) in zip(weights, seen, strict=True)))
                y = hidden[t] + attn.o_proj.weight @ torch.cat(heads)
                x = rms_norm(y, layer.post_attention_layernorm.weight, eps)
                u = y + layer.mlp.down_proj.weight @ (
                    F.silu(layer.mlp.gate_proj.weight @ x) * (layer.mlp.up_proj.weight @ x)
                )
                following[t] = u
                logits = drafter.lm_head.weight @ rms_norm(u, drafter.norm.weight, eps)
                result.logits[number, k, t] = logits
                if counts(mask, t, k):
                    teacher = head @ last[teaching.index(t + 1 + k)]
                    best = int(teacher.argmax())
                    result.right[number, k, t] = ids[int(logits.argmax())] == best
                    if best in ids:
                        p = torch.softmax(teacher[ids], 0)
                        result.losses[number, k, t] = -(p * torch.log_softmax(logits, 0)).sum()
            hidden = {**hidden, **following}
    return result
