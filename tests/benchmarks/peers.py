"""The peers' EAGLE-3 training steps, called as their own trainers call them.

Their packages must be importable (PYTHONPATH); the packages that they import for other purposes (serving, data sets) may be
missing: those names are stood in for by empty modules.
"""

import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.benchmarks.training_step import Batch, Running, Shape

UNUSED = (
    "openai",
    "datasets",
    "loguru",
    "hs_connectors",
    "pydantic_settings",
    "aiohttp",
    "yunchang",
    "sglang",
    "wandb",
)
"""Imported by the peers, but not by what is measured here."""
DECAY = 0.8


class _Empty(types.ModuleType):
    __path__: tuple[str, ...] = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns:
    """Found last, so that an installed package is always preferred."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in UNUSED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _stand_in() -> None:
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.append(_StandIns())  # type: ignore[arg-type]


def llama_config(**sizes: Any) -> Any:
    """A Llama of one layer; `draft_vocab_size` is taken too."""
    from transformers import LlamaConfig

    drafts = sizes.pop("draft_vocab_size")
    config = LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, pad_token_id=0, **sizes)
    config.draft_vocab_size = drafts
    return config


def _llama(shape: "Shape") -> Any:
    return llama_config(
        vocab_size=shape.vocab, draft_vocab_size=shape.drafts, hidden_size=shape.hidden,
        intermediate_size=shape.intermediate, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=2 * shape.length, rms_norm_eps=1e-6,
    )  # fmt: skip


def speculators_step(
    shape: "Shape", batch: "Batch", steps: int, flops: float, attention: str = "simple_flex_attention"
) -> "Running":
    """speculators: packed documents, float32 weights under autocast, AdamW, eager KL."""
    from tests.benchmarks.training_step import Running

    _stand_in()
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    device = batch.aux_BTC.device
    layer = _llama(shape)
    layer._attn_implementation = attention
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.drafts,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config).to(device).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.02)
        model.embed_tokens.weight.copy_(batch.embedding_VH)
        model.verifier_lm_head.weight.copy_(batch.head_VH[: shape.drafts])
        model.t2d[: shape.drafts] = True
    model.lm_head.weight.requires_grad_(True)
    model.embed_tokens.to(torch.bfloat16)
    model.verifier_lm_head.to(torch.bfloat16)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    documents, length = batch.tokens_BT.shape
    mask_BT = batch.mask_BT.roll(-1, 1)
    mask_BT[:, -1] = False
    # as its `shift_batch`: token t+1 with the states of t, teacher at t+1; every document keeps its length, since its
    # block mask wants a multiple of 128
    given = {
        "hidden_states": batch.aux_BTC.flatten(0, 1)[None],
        "input_ids": batch.tokens_BT.roll(-1, 1).flatten()[None],
        "verifier_last_hidden_states": batch.last_BTH.roll(-1, 1).flatten(0, 1)[None],
        "loss_mask": mask_BT.flatten()[None],
        "position_ids": torch.arange(length, device=device).repeat(documents)[None],
        "document_ids": torch.arange(documents, device=device).repeat_interleave(length)[None],
        "loss_config": resolve_loss_config("kl_div", "eager"),  # the fused one does not compile with torch 2.11
    }

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            _, loss, _ = model(**given, ttt_steps=steps, ttt_step_loss_decay=DECAY)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def fixed() -> list[Tensor]:
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [*model.parameters(), *trained, *state, *model.buffers(), batch.embedding_VH, batch.head_VH]

    return Running(step, fixed, flops)


def specforge_trainer(
    config: Any, embedding_VH: Tensor, t2d_V: Tensor, steps: int, *, attention: str = "flex_attention", **optimizer: Any
) -> tuple[Any, Any]:
    """SpecForge's model around its drafter of random bfloat16 weights, and its optimizer with float32 masters."""
    _stand_in()
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer

    draft = LlamaForCausalLMEagle3(config, attention_backend=attention).to(embedding_VH.device, torch.bfloat16)
    draft.embed_tokens.weight.requires_grad_(False)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(embedding_VH)
        draft.t2d.copy_(t2d_V)
        ids = t2d_V.nonzero()[:, 0]
        draft.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    return OnlineEagle3Model(draft, length=steps, attention_backend=attention), BF16Optimizer(draft, **optimizer)


def specforge_step(shape: "Shape", batch: "Batch", steps: int, flops: float) -> "Running":
    """SpecForge: a row a document, bfloat16 weights with float32 masters in its optimizer, the compact teacher."""
    from tests.benchmarks.training_step import Running

    t2d = torch.zeros(shape.vocab, dtype=torch.bool, device=batch.aux_BTC.device)
    t2d[: shape.drafts] = True
    model, optimizer = specforge_trainer(
        _llama(shape), batch.embedding_VH, t2d, steps, lr=1e-4, max_grad_norm=1.0, total_steps=10_000
    )
    given = {
        "input_ids": batch.tokens_BT.roll(-1, 1),
        "attention_mask": torch.ones_like(batch.tokens_BT),
        "loss_mask": batch.mask_BT[..., None].long(),
        "hidden_states": batch.aux_BTC,
        "target": None,
        "target_hidden_for_compact": batch.last_BTH.roll(-1, 1),
        "target_head_weight": batch.head_VH,
    }

    def step() -> None:
        losses = model(**given)[0]
        sum(DECAY**k * loss for k, loss in enumerate(losses)).backward()
        optimizer.step()

    def fixed() -> list[Tensor]:
        inner = optimizer.optimizer
        state = [v for s in inner.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [
            *model.parameters(), *optimizer.model_params, *optimizer.fp32_params, *state, *model.buffers(),
            batch.embedding_VH, batch.head_VH,
        ]  # fmt: skip

    return Running(step, fixed, flops)
