"""The commands `ray-eagle drafter show`, `check` and `convert` as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_eagle.cli import app
from tests.drafters import AQ_MEDAI, edit, kimi_config, llama_config, sparse_drafter, tiny_folder


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["drafter", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "drafter")


def test_show_says_what_it_is(folder: Path) -> None:
    code, out, _ = run("show", folder)
    assert code == 0
    for words in ("EAGLE-3, one Llama layer", "15 tensors", "4 heads, 2 key/value heads of 16", "128 of 261 tokens",
                  "default, theta 10000.0", "outputs of [0, 2, 3]", "midlayer.self_attn.q_proj.weight", "64 x 64", "BF16"):  # fmt: skip
        assert words in out
    code, out, _ = run("show", folder, "--json")
    found = json.loads(out)
    assert (code, found["format"], found["problem"]) == (0, "sglang", "")
    assert found["shape"]["aux_layers"] == [1, 3, 4]
    assert found["tensors"]["lm_head.weight"] == {"dtype": "BF16", "shape": [128, 32], "bytes": 8192}
    assert found["bytes"] == sum(tensor["bytes"] for tensor in found["tensors"].values())


def test_show_works_on_what_cannot_be_trained(folder: Path) -> None:
    edit(architectures=["Eagle3DeepseekV2ForCausalLM"])(folder)
    code, out, _ = run("show", folder)
    assert code == 0
    assert "latent attention" in out and "not trainable" in out


@pytest.mark.parametrize(
    ("ids", "word"), [("1,14,26", "'1,14,26'"), ([1, "3", 4], "'3'"), ({"a": 1}, "{'a': 1}"), (3, "3")]
)
def test_layer_ids_that_are_no_list_of_numbers_are_one_error(
    folder: Path, tmp_path: Path, ids: object, word: str
) -> None:
    edit(eagle_config__eagle_aux_hidden_state_layer_ids=ids)(folder)
    message = f"expected three layer ids (output of layer L, 0-based), found {word}."
    code, out, _ = run("show", folder, "--json")
    found = json.loads(out)
    assert code == 0 and message in found["problem"] and found["shape"]["hidden_size"] == 32
    code, out, _ = run("show", folder)
    assert code == 0 and "not trainable" in out and "no list of them in the config" in out
    code, out, _ = run("check", folder, "--target", llama_config(tmp_path / "target"), "--json")
    (finding,) = json.loads(out)["findings"]
    assert code == 1 and message in f"{finding['message']}"
    code, out, _ = run("convert", folder, tmp_path / "new", "--aux-layers", "1,3,4", "--json")
    assert (code, json.loads(out)["written_ids"]) == (0, [1, 3, 4])


def test_check_ends_with_0_or_1_and_tells_a_way_out(folder: Path, tmp_path: Path) -> None:
    target = llama_config(tmp_path / "target")
    code, out, _ = run("check", folder, "--target", target, "--engine", "sglang==0.5.23")
    assert code == 0
    assert out.startswith("ok") and "fits the target" in out
    code, out, _ = run("check", folder, "--target", target, "--engine", "vllm")
    assert code == 1
    assert "error    aux layers: vllm reads [1, 3, 4]" in out
    assert "-> ray-eagle drafter convert" in out
    code, out, _ = run("check", folder, "--target", llama_config(tmp_path / "other", hidden_size=64), "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (1, False)
    assert [f["level"] for f in found["findings"]].count("error") == 1
    code, _, err = run("check", folder, "--engine", "tgi")
    assert code == 2 and "--engine" in err
    code, _, err = run("check", folder, "--target", tmp_path / "nothing")
    assert code == 1 and "no target" in err


def test_convert_writes_what_check_then_accepts(folder: Path, tmp_path: Path) -> None:
    target = llama_config(tmp_path / "target")
    code, out, _ = run("convert", folder, tmp_path / "v", "--engine", "vllm", "--target", target)
    assert code == 0
    assert "layer ids [2, 4, 5] (outputs of [1, 3, 4])" in out
    assert run("check", tmp_path / "v", "--target", target, "--engine", "vllm")[0] == 0
    code, out, _ = run("convert", folder, tmp_path / "s", "--to", "speculators", "--json")
    found = json.loads(out)
    assert (code, found["format"], found["written_ids"]) == (0, "speculators", [2, 4, 5])
    assert any("no embedding" in note for note in found["notes"])
    assert run("convert", folder, tmp_path / "x", "--aux-layers", "0,2,4")[0] == 0
    code, _, err = run("convert", folder, tmp_path / "y", "--aux-layers", "4,2,0")
    assert code == 2 and "expected three ids, ascending" in err
    code, _, err = run("convert", folder, tmp_path / "x")
    assert code == 1 and "expected no folder, or an empty one" in err


def test_no_command_waits_for_torch_or_transformers(tmp_path: Path) -> None:
    """Which take seconds to import. On the founding drafter, a sixteenth as wide, and a Kimi target, whose config is nested."""
    narrow = AQ_MEDAI.model_copy(update={"hidden_size": 448, "num_attention_heads": 4, "num_key_value_heads": 4})
    drafter = sparse_drafter(tmp_path / "drafter", narrow)
    target = kimi_config(tmp_path / "target", hidden_size=448)
    commands = [
        ["show", drafter],
        ["check", drafter, "--target", target, "--engine", "reference"],
        ["convert", drafter, tmp_path / "new", "--to", "speculators", "--target", target],
    ]
    program = (
        "import json, sys; from ray_eagle.cli import app; code = app(json.loads(sys.argv[1]), standalone_mode=False); "
        "sys.exit(code or ', '.join({'torch', 'transformers', 'ray'} & sys.modules.keys()) or 0)"
    )
    for words in commands:
        given = json.dumps(["drafter", *map(str, words)])
        ended = subprocess.run([sys.executable, "-c", program, given], capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, ""), words
