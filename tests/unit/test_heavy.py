"""The heavy target of the GPU measurements: its states and logits are those of the target that it was made of."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.gpu.heavy import make_heavy
from tests.tiny import VOCAB, tiny_target


def test_a_heavy_target_answers_as_the_one_it_was_made_of(tmp_path: Path) -> None:
    source = tiny_target(tmp_path / "source", tie=True)
    make_heavy(source, tmp_path / "heavy", extra=20, intermediate=256)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("source", "heavy")]
    assert [model.config.num_hidden_layers for model in models] == [8, 28]
    idle = models[1].model.layers[20]
    assert idle.mlp.up_proj.weight.shape == (256, 32) and idle.mlp.up_proj.weight.abs().sum() > 0
    tokens = torch.randint(0, VOCAB, (2, 50))
    with torch.no_grad():
        given, heavy = (model(tokens, output_hidden_states=True) for model in models)
    torch.testing.assert_close(heavy.logits, given.logits)
    for one, other in zip(heavy.hidden_states[:8], given.hidden_states[:8], strict=True):
        torch.testing.assert_close(one, other)
