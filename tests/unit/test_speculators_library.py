"""The speculators library itself, 0.9.0, where it can be imported (its wheel unpacked on PYTHONPATH): it loads our export, and
a drafter that it wrote loads here; both give the same logits."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_eagle.config import TargetConfig
from ray_eagle.drafter.checkpoint import load_drafter, save_drafter
from ray_eagle.drafter.convert import convert
from ray_eagle.drafter.model import Drafter
from ray_eagle.target.loading import head_and_embedding, read_facts
from ray_eagle.target.sizes import read_target
from tests.benchmarks.peers import stand_in
from tests.tiny import VOCAB, tiny_drafter, tiny_shape, tiny_target
from tests.unit.test_rotary import ROPES

T, H = 23, 32


@pytest.fixture(scope="module")
def library() -> Any:
    """Its EAGLE-3 drafter; packages that it imports for other purposes may be missing."""
    if missing := [name for name in ("speculators", "loguru") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {' and '.join(missing)}")
    stand_in()
    return importlib.import_module("speculators.models.eagle3.core").Eagle3DraftModel


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files: the library wants an index."""
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny", shard="50KB")


def their_logits(model: Any, tokens_T: Tensor, aux_TC: Tensor) -> Tensor:
    """[T, D] of its first draft step."""
    seen: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        model(aux_TC[None], tokens_T[None], torch.zeros(1, len(tokens_T), dtype=torch.long), ttt_steps=1)
    handle.remove()
    return seen[0][0].float()


def our_logits(drafter: Drafter, embedding_VH: Tensor, tokens_T: Tensor, aux_TC: Tensor) -> Tensor:
    """[T, D] by a plain causal softmax."""
    positions = torch.arange(len(tokens_T))
    with torch.no_grad():
        hidden_TH = drafter.project(aux_TC)
        given = drafter.attention_input(hidden_TH, embedding_VH[tokens_T])
        q_TAE = drafter.queries(given, positions)
        k_TGE, v_TGE = drafter.keys_values(given, positions)
        share = q_TAE.shape[1] // k_TGE.shape[1]
        k_TAE, v_TAE = k_TGE.repeat_interleave(share, 1), v_TGE.repeat_interleave(share, 1)
        scores_ATT = torch.einsum("tae,sae->ats", q_TAE, k_TAE) * q_TAE.shape[-1] ** -0.5
        scores_ATT.masked_fill_(positions[None, None, :] > positions[None, :, None], -torch.inf)
        return drafter.logits(drafter.finish(hidden_TH, torch.einsum("ats,sae->tae", scores_ATT.softmax(-1), v_TAE)))


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (T,), generator=generator), torch.randn(T, 3 * H, generator=generator)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("draft_vocab", [128, VOCAB])
def test_it_loads_our_export_and_what_it_writes_loads_here(
    library: Any, tmp_path: Path, target_folder: Path, rope: dict[str, Any], draft_vocab: int
) -> None:
    shape = tiny_shape(draft_vocab=draft_vocab).model_copy(update={"rope_parameters": rope})
    drafter = tiny_drafter(shape, seed=5)
    save_drafter(drafter, tmp_path / "ours", torch.float32)
    convert(tmp_path / "ours", tmp_path / "export", "speculators", target=read_target(target_folder))
    _, embedding_VH, _ = head_and_embedding(read_facts(TargetConfig(path=str(target_folder), aux_layers=(1, 3, 4))))
    tokens_T, aux_TC = inputs(seed=6)
    expected = our_logits(load_drafter(tmp_path / "ours"), embedding_VH.float(), tokens_T, aux_TC)

    theirs = library.from_pretrained(str(tmp_path / "export"), attn_implementation="eager").float().eval()
    assert theirs.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    torch.testing.assert_close(their_logits(theirs, tokens_T, aux_TC), expected, rtol=1e-4, atol=2e-4)

    with torch.no_grad():
        theirs.fc.weight.mul_(1.01)  # a drafter that only it has
    theirs.save_pretrained(str(tmp_path / "back"))
    again = load_drafter(tmp_path / "back")
    assert again.shape == shape
    found = our_logits(again, embedding_VH.float(), tokens_T, aux_TC)
    torch.testing.assert_close(found, their_logits(theirs, tokens_T, aux_TC), rtol=1e-4, atol=2e-4)
    assert not torch.allclose(found, expected, rtol=1e-4, atol=2e-4)
