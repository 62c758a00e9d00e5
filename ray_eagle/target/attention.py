"""Attention over packed documents: causal inside each, nothing between them, and no T x T mask anywhere.

transformers calls the function registered here for every layer of a model whose implementation is `PACKED`. No mask
function is registered beside it on purpose: then transformers builds no mask and does not look for documents in the
positions, which would stall a GPU once a pass. The documents' bounds come down the decoder as the keyword arguments that
flash attention uses (`document_arguments`).
"""

import inspect
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ray_eagle.errors import TargetError

PACKED = "eagle_packed"
GROUPED = "eagle_grouped"
CAUSAL = (-1, 0)
BLOCK = 256
"""Queries whose scores exist at once, where they are written out."""
FLASH_HEAD_DIM = 256
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_CAPABILITY = (8, 0)
HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
"""Arguments that decoders hand down and that do not change the result."""


def register_packed_attention() -> None:
    """Make `attn_implementation=PACKED` known to transformers; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def group_queries(model: Any) -> None:
    """Let a model that was loaded with `sdpa` decode without copying its keys and values for each query head; else nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.config._attn_implementation == "sdpa" and packed_attention_fits(model.config) is None:
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.set_attn_implementation(GROUPED)


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Output [B, Q, heads, value dim], in transformers' calling convention: the query heads of a key head as its queries.

    `query` is [B, heads, Q, E], `key` and `value` [B, kv heads, T, E or value dim]; the mask knows the window. Raises
    TargetError for what it cannot compute.
    """
    _refuse_unknown(module, more)
    batch, heads, queries, _ = query.shape
    groups = key.shape[1]
    if queries == 1 and groups < heads:
        folded = query.view(batch, groups, heads // groups, -1)
        output = scaled_dot_product_attention(folded, key, value, attention_mask, dropout, scale=scaling)
        return output.reshape(batch, 1, heads, -1), None
    causal = queries > 1 and attention_mask is None and is_causal is not False
    output = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=groups < heads
    )
    return output.transpose(1, 2), None


def document_arguments(bounds_N1: Tensor, longest: int) -> dict[str, Any]:
    """Keyword arguments of the decoder that tell the documents apart: int32 bounds [N + 1] on its device, tokens of the longest."""
    return {
        "cu_seq_lens_q": bounds_N1,
        "cu_seq_lens_k": bounds_N1,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention_fits(config: Any) -> str | None:
    """Why a model with this transformers config cannot use `PACKED`; None when it can."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"layers of type {', '.join(other)}"
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None):
        return "attention that is not causal"
    return None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Output [1, T, heads, value dim] of one pack, in transformers' calling convention.

    `query` is [1, heads, T, E], `key` and `value` [1, kv heads, T, E or value dim]; `cu_seq_lens_q` the int32 bounds of the
    documents; `sliding_window` counts the token itself; `s_aux` [heads] are attention sinks, scores of a key without a value.
    Half precision on a GPU runs as one flash kernel, asynchronously; soft-capped scores and everything else document by
    document (on a GPU that reads the bounds, and so waits for it). Raises TargetError for what it cannot compute.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise _cannot(module, "no document bounds reach its attention")
    if attention_mask is not None:
        raise _cannot(module, "it brings an attention mask of its own")
    if dropout:
        raise _cannot(module, "it asks for attention dropout")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise _cannot(module, "its attention is not causal")
    _refuse_unknown(module, more)
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    if softcap is None and flash_runs(query.device, query.dtype, query.shape[-1]):
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling, window, s_aux), None
    if window is None and softcap is None and s_aux is None:
        return _by_document(query, key, value, cu_seq_lens_q, scaling), None
    return _in_blocks(query, key, value, cu_seq_lens_q, scaling, window, softcap, s_aux), None


def flash_runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether PyTorch's flash kernel takes such queries."""
    return (
        device.type == "cuda"
        and dtype in FLASH_DTYPES
        and head_dim <= FLASH_HEAD_DIM
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
    )


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_N1: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    sinks_A: Tensor | None,
) -> Tensor:
    varlen_attn, known = _varlen()
    width = value.shape[-1]
    if width < query.shape[-1]:  # MLA: the kernel knows one head dimension; zeros beside the values come out as zeros
        value = pad(value, (0, query.shape[-1] - width))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options = known | {"scale": scaling, "window_size": CAUSAL if window is None else (window - 1, 0)}
    if sinks_A is None:
        output_TAE = varlen_attn(q, k, v, bounds_N1, bounds_N1, longest, longest, **options)
    else:  # a sink takes its share of each softmax
        from torch.nn.attention.varlen import AuxRequest

        options["return_aux"] = AuxRequest(lse=True)
        output_TAE, lse_AT = varlen_attn(q, k, v, bounds_N1, bounds_N1, longest, longest, **options)
        output_TAE = (output_TAE * (lse_AT - sinks_A.float()[:, None]).sigmoid().T[..., None]).to(query.dtype)
    return output_TAE[None, ..., :width]


@cache
def _varlen() -> tuple[Callable[..., Any], dict[str, Any]]:
    """The kernel and its options: torch 2.11 groups query heads unasked, later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in known else {}


def _by_document(query: Tensor, key: Tensor, value: Tensor, bounds_N1: Tensor, scaling: float | None) -> Tensor:
    bounds = bounds_N1.tolist()
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for start, end in pairwise(bounds):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_N1: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks_A: Tensor | None,
) -> Tensor:
    """Scores written out, for a block of one document's queries at a time."""
    tokens, width = query.shape[2:]
    grouped = query[0].unflatten(0, (key.shape[1], -1))  # [kv heads, queries of each, T, E]
    places_T = torch.arange(tokens, device=query.device)
    outputs = []
    for start, end in pairwise(bounds_N1.tolist()):
        for first in range(start, end, BLOCK):
            queries = slice(first, min(first + BLOCK, end))
            keys = slice(start if window is None else max(start, first - window + 1), queries.stop)
            scores = grouped[:, :, queries] @ key[0, :, None, keys].mT * (width**-0.5 if scaling is None else scaling)
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            behind_QK = places_T[queries, None] - places_T[keys]
            hidden_QK = (behind_QK < 0) | (behind_QK >= (tokens if window is None else window))
            scores = scores.float().masked_fill(hidden_QK, -torch.inf).flatten(0, 1)
            if sinks_A is not None:
                scores = torch.cat([scores, sinks_A.float()[:, None, None].expand(-1, len(behind_QK), 1)], dim=-1)
            shares = scores.softmax(-1)[..., : behind_QK.shape[1]].to(value.dtype)
            outputs.append((shares.unflatten(0, grouped.shape[:2]) @ value[0, :, None, keys]).flatten(0, 1))
    return torch.cat(outputs, dim=1).transpose(0, 1)[None]


def _refuse_unknown(module: Any, more: dict[str, Any]) -> None:
    if unknown := sorted(name for name, given in more.items() if given is not None and name not in HARMLESS):
        raise _cannot(module, f"it passes {', '.join(unknown)} to its attention")


def _cannot(module: Any, why: str) -> TargetError:
    return TargetError(
        f"packed attention cannot run {type(module).__name__}: {why}. Set target.attention to `eager` or a flash_attention "
        "implementation, which transformers then runs by itself."
    )
