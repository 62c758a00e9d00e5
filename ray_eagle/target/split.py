"""Where to cut a target that is larger than one GPU: contiguous layers, the slowest stage as fast as can be."""

from itertools import accumulate

from ray_eagle.errors import TargetError
from ray_eagle.target.loading import TargetFacts
from ray_eagle.target.sizes import read_text_config
from ray_eagle.target.tensors import layer_of, read_header, tensor_files

PACKED_INT4 = "weight_packed"
INT4_PER_INT32 = 8
EXPERTS = ".experts."


def layer_costs(facts: TargetFacts) -> list[float]:
    """Relative compute of each layer per token: its active weights, counted from the safetensors headers alone.

    A routed expert's weights count by the share of experts that a token visits. The last layer also pays for the head
    (as if every position were supervised). Raises TargetError when a weights file is missing or cut short.
    """
    share = active_share(read_text_config(facts.path))
    files = tensor_files(facts.path)
    costs = [0.0] * facts.layers
    for file in sorted(set(files.values())):
        for name, header in read_header(file).items():
            layer = layer_of(name)
            if layer is None or layer >= facts.layers:  # beyond the last: multi-token prediction, which is not run
                continue
            elements = header.elements * (INT4_PER_INT32 if name.endswith(PACKED_INT4) else 1)
            costs[layer] += elements * (share if EXPERTS in name else 1.0)
    costs[-1] += facts.vocab_size * facts.hidden_size
    return costs


def active_share(text: dict[str, object]) -> float:
    """Experts that a token visits, of all routed ones, by a config.json; 1 for a dense model."""
    experts = next((text[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if text.get(k)), None)
    visited = text.get("num_experts_per_tok")
    return visited / experts if isinstance(visited, int) and isinstance(experts, int) else 1.0


def split_layers(costs: list[float], stages: int) -> list[range]:
    """`stages` contiguous, non-empty ranges over the layers whose largest cost is the smallest possible (exact).

    Raises TargetError when there are fewer layers than stages.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise TargetError(f"a target with {layers} layers cannot be split into {stages} stages: use 1 to {layers}.")
    sums = [0.0, *accumulate(costs)]
    worst = sums  # worst[end]: the largest stage cost of the first `end` layers, split at best into the stages so far
    cuts = [[0] * (layers + 1)]
    for stage in range(1, stages):
        cut, best = [0] * (layers + 1), [0.0] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            best[end], cut[end] = min((max(worst[at], sums[end] - sums[at]), at) for at in range(stage, end))
        worst = best
        cuts.append(cut)
    ranges: list[range] = []
    end = layers
    for cut in reversed(cuts):
        ranges.append(range(cut[end], end))
        end = cut[end]
    return ranges[::-1]
