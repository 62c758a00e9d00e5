"""AdamW on the float32 masters, clipped and guarded on the device: no step waits to learn whether its gradient was finite."""

import torch
from torch import Tensor

from ray_eagle.drafter.model import Drafter


def make_optimizer(
    drafter: Drafter, *, lr: float, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0
) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices alone."""
    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    norms = [p for p in drafter.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def clip_and_step(optimizer: torch.optim.AdamW, lr: float, clip: float) -> Tensor:
    """One step with gradients scaled to a norm of `clip` at most; nothing changes when the norm is not finite.

    Returns the norm [] before clipping. The gradients are gone afterwards.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack(torch._foreach_norm([p.grad for p in parameters if p.grad is not None])).norm()
    # What a GradScaler would set: the fused kernel divides by the scale, and does nothing where infinities were found.
    optimizer.grad_scale = ((norm + 1e-6) / clip).clamp(min=1)
    optimizer.found_inf = (~norm.isfinite()).float()
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
