"""The slow, obvious twin of unrolled training: float64 loops over documents, steps and positions (EAGLE3.md, section 3)."""

import math
from dataclasses import dataclass
from typing import Any

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


def rotate(x_E: Tensor, position: int, frequencies: list[float], size: float = 1.0) -> Tensor:
    """Coordinate i turns with i + E/2."""
    half = len(x_E) // 2
    out = []
    for i in range(half):
        angle = position * frequencies[i]
        out.append((x_E[i] * math.cos(angle) - x_E[i + half] * math.sin(angle)) * size)
    for i in range(half):
        angle = position * frequencies[i]
        out.append((x_E[i + half] * math.cos(angle) + x_E[i] * math.sin(angle)) * size)
    return torch.stack(out)


def rotate_neighbours(x_E: Tensor, position: int, frequencies: list[float], size: float = 1.0) -> Tensor:
    """Coordinate 2i turns with 2i + 1 (DeepSeek)."""
    turned = rotate(torch.cat([x_E[0::2], x_E[1::2]]), position, frequencies, size)
    return torch.stack(turned.chunk(2), dim=1).flatten()


def counts(mask: list[int], t: int, k: int) -> bool:
    """Tokens t+1 .. t+2+k exist and are all the assistant's."""
    return t + 2 + k < len(mask) and all(mask[t + 1 + i] for i in range(k + 2))


class SlowLayer:
    """The drafter's layer in float64, one position and one head at a time."""

    def __init__(self, drafter: Drafter, frequencies: list[float], size: float, scale: float) -> None:
        self.drafter, self.layer, self.shape = drafter, drafter.midlayer, drafter.shape
        self.rope, self.scale, self.eps = (frequencies, size), scale, drafter.shape.rms_norm_eps
        self.attn: Any = self.layer.self_attn

    def input(self, embedded_H: Tensor, hidden_H: Tensor) -> Tensor:
        e = rms_norm(embedded_H, self.layer.input_layernorm.weight, self.eps)
        return torch.cat([e, rms_norm(hidden_H, self.layer.hidden_norm.weight, self.eps)])

    def queries(self, x: Tensor, position: int) -> list[Tensor]:
        """Of each head."""
        shape, attn, latent = self.shape, self.attn, self.shape.latent
        if latent is None:
            query = (attn.q_proj.weight @ x).view(shape.num_attention_heads, shape.head_dim)
            return [rotate(q, position, *self.rope) for q in query]
        if latent.q_lora_rank is None:
            query = attn.q_proj.weight @ x
        else:
            query = attn.q_b_proj.weight @ rms_norm(attn.q_a_proj.weight @ x, attn.q_a_layernorm.weight, self.eps)
        kept, turned = latent.qk_nope_head_dim, latent.qk_rope_head_dim
        return [
            torch.cat([q[:kept], rotate_neighbours(q[kept:], position, *self.rope)])
            for q in query.view(shape.num_attention_heads, kept + turned)
        ]

    def keys_values(self, x: Tensor, position: int) -> list[tuple[Tensor, Tensor]]:
        """For each head."""
        shape, attn, latent = self.shape, self.attn, self.shape.latent
        if latent is None:
            keys, values = (
                (p.weight @ x).view(shape.num_key_value_heads, shape.head_dim) for p in (attn.k_proj, attn.v_proj)
            )
            pairs = [(rotate(key, position, *self.rope), value) for key, value in zip(keys, values, strict=True)]
            return [pairs[a * len(pairs) // shape.num_attention_heads] for a in range(shape.num_attention_heads)]
        rank, kept = latent.kv_lora_rank, latent.qk_nope_head_dim
        down = attn.kv_a_proj_with_mqa.weight @ x
        shared = rotate_neighbours(down[rank:], position, *self.rope)
        both = attn.kv_b_proj.weight @ rms_norm(down[:rank], attn.kv_a_layernorm.weight, self.eps)
        heads = both.view(shape.num_attention_heads, kept + latent.v_head_dim)
        return [(torch.cat([head[:kept], shared]), head[kept:]) for head in heads]

    def output(self, hidden_H: Tensor, x: Tensor, position: int, seen: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
        """The un-normed output; `seen`: keys and values of all positions that it sees, its own among them."""
        heads = []
        for a, q in enumerate(self.queries(x, position)):
            weights = torch.softmax(torch.stack([q @ one[a][0] for one in seen]) * self.scale, 0)
            heads.append(sum(w * one[a][1] for w, one in zip(weights, seen, strict=True)))
        y = hidden_H + self.attn.o_proj.weight @ torch.cat(heads)  # type: ignore[arg-type]
        z, mlp = rms_norm(y, self.layer.post_attention_layernorm.weight, self.eps), self.layer.mlp
        return y + mlp.down_proj.weight @ (F.silu(mlp.gate_proj.weight @ z) * (mlp.up_proj.weight @ z))

    def logits(self, output_H: Tensor) -> Tensor:
        return self.drafter.lm_head.weight @ rms_norm(output_H, self.drafter.norm.weight, self.eps)


def plain_layer(drafter: Drafter, theta: float) -> SlowLayer:
    """With the default RoPE and scale."""
    width = drafter.shape.latent.qk_rope_head_dim if drafter.shape.latent else drafter.shape.head_dim
    frequencies = [theta ** (-2 * i / width) for i in range(width // 2)]
    return SlowLayer(drafter, frequencies, 1.0, 1 / math.sqrt(drafter.shape.head_dim))


def slow_unroll(layer: SlowLayer, samples: list[Sample], embedding: Tensor, head: Tensor, steps: int) -> SlowResult:
    """The layer's drafter must be float64; `embedding` and `head` are the target's, [V, H] float64."""
    drafter = layer.drafter
    ids = [i + int(d) for i, d in enumerate(drafter.d2t)]
    result = SlowResult({}, {}, {})
    for number, sample in enumerate(samples):
        tokens, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        teaching = [s for s in range(len(mask) - 1) if mask[s + 1]]
        aux, last = sample.aux_states(torch.float64), sample.last.double()
        hidden = {t: drafter.fc.weight @ aux[t] for t in range(len(tokens))}
        base: dict[int, list[tuple[Tensor, Tensor]]] = {}
        own: dict[int, list[list[tuple[Tensor, Tensor]]]] = {t: [] for t in range(len(tokens))}
        for k in range(steps):
            defined = [t for t in range(len(tokens)) if t + 1 + k < len(tokens)]
            inputs = {t: layer.input(embedding[tokens[t + 1 + k]], hidden[t]) for t in defined}
            for t in defined:
                found = layer.keys_values(inputs[t], t + k)
                if k == 0:
                    base[t] = found
                else:
                    own[t].append(found)
            following = {}
            for t in defined:
                seen = [base[j] for j in range(t + 1)] + own[t]
                u = layer.output(hidden[t], inputs[t], t + k, seen)
                following[t] = u
                logits = layer.logits(u)
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
