"""Settings: what wins over what, where each value came from, and how a wrong one is named."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_eagle.config import Config
from ray_eagle.settings import LoadedConfig, as_yaml, flatten, load_config, parse_flags

FOUNDING = "kimi-k2.5"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def look_up(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def origin(loaded: LoadedConfig, key: str) -> str:
    return {name: where for name, _, where in loaded.rows()}[key]


# --- layers ---------------------------------------------------------------------------------------------------------


def test_flags_win_over_the_file_the_file_over_its_preset_and_the_preset_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", f"preset: {FOUNDING}\ntrain: {{lr: 1e-4, epochs: 7}}\nseed: 3\n")
    loaded = load_config(file, flags=["--train.epochs", "9"])
    found = {
        key: (look_up(loaded.config, key), origin(loaded, key))
        for key in ("train.epochs", "train.lr", "seed", "train.noise", "vocab.size", "train.clip", "preset")
    }
    assert found == {
        "train.epochs": (9, "flag"),
        "train.lr": (1e-4, file),
        "seed": (3, file),
        "train.noise": (0.05, f"preset {FOUNDING}"),
        "vocab.size": (32000, f"preset {FOUNDING}"),
        "train.clip": (1.0, "default"),
        "preset": (FOUNDING, file),
    }


CHOICES: dict[str, list[Any]] = {
    "seed": [1, 2, 3],
    "train.lr": [1e-4, 2e-4, 3e-4],
    "train.epochs": [6, 7, 8],
    "serve.host": ["a", "b", "c"],
    "target.aux_layers": [(1, 2, 3), (2, 3, 4), (3, 4, 5)],
    "breakeven.steps": [(1,), (2,), (1, 2, 3)],
}


@pytest.mark.parametrize("seed", range(20))
def test_random_layers_give_what_setting_key_by_key_gives(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    in_file, in_flags = ({k: rng.choice(v) for k, v in CHOICES.items() if rng.random() < 0.5} for _ in range(2))
    tree: dict[str, Any] = {}
    for key, value in in_file.items():
        section, _, leaf = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = list(value) if isinstance(value, tuple) else value
    file = write(tmp_path / "run.yaml", yaml.safe_dump(tree))
    words = [w for k, v in in_flags.items() for w in (f"--{k}", json.dumps(v))]
    loaded = load_config(file, flags=words)

    for key, value, where in loaded.rows():
        if key in in_flags:
            assert (value, where) == (in_flags[key], "flag")
        elif key in in_file:
            assert (value, where) == (in_file[key], file)
        else:
            assert (value, where) == (look_up(Config(), key), "default")


def test_a_preset_on_the_command_line_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "preset: smollm2-cpu\nseed: 4\n")
    loaded = load_config(file, preset=FOUNDING)
    assert loaded.config.preset == FOUNDING
    assert origin(loaded, "preset") == f"preset {FOUNDING}"
    assert loaded.config.target.path == ""  # smollm2-cpu sets one
    assert loaded.config.seed == 4


def test_nothing_given_is_all_defaults() -> None:
    loaded = load_config()
    assert loaded.config == Config()
    assert {where for _, _, where in loaded.rows()} == {"default"}


def test_an_empty_group_of_free_names_is_listed_too(tmp_path: Path) -> None:
    assert ("serve.env", {}, "default") in load_config().rows()
    file = write(tmp_path / "run.yaml", "serve: {env: {}}\n")
    assert ("serve.env", {}, file) in load_config(file).rows()
    rows = load_config(file, flags=["--serve.env.A", "x"]).rows()
    assert [row for row in rows if row[0].startswith("serve.env")] == [("serve.env.A", "x", "flag")]


def test_effective_settings_written_to_a_file_load_to_the_same(tmp_path: Path) -> None:
    config = load_config(preset=FOUNDING, flags=["--serve.token", '"1e5"', "--ray.address", "auto"]).config
    file = write(tmp_path / "again.yaml", yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(file).config == config


# --- flags and values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "tree"),
    [
        (["--train.lr", "0.5"], {"train": {"lr": 0.5}}),
        (["--train.lr=0.5"], {"train": {"lr": 0.5}}),
        (["--train-anyway"], {"train_anyway": True}),
        (["--train-anyway", "--seed", "-3"], {"train_anyway": True, "seed": -3}),
        (["--train-anyway=false"], {"train_anyway": False}),
        (["--target.aux-layers", "[1,3,4]"], {"target": {"aux_layers": [1, 3, 4]}}),
        (["--target.aux_layers=[1, 3, 4]"], {"target": {"aux_layers": [1, 3, 4]}}),
        (["--breakeven.steps", "[1,2]"], {"breakeven": {"steps": [1, 2]}}),
        (["--train.lr", "1", "--train.epochs", "2"], {"train": {"lr": 1, "epochs": 2}}),
        (["--train.lr", "1", "--train.lr", "2"], {"train": {"lr": 2}}),
        (["--target.aux_layers", "null"], {"target": {"aux_layers": None}}),
        (["--serve.token", '"1234"'], {"serve": {"token": "1234"}}),
        (["--serve.token", "'3e5'"], {"serve": {"token": "3e5"}}),
        (["--run="], {"run": ""}),
        (["--run", "s3://bucket/a=b"], {"run": "s3://bucket/a=b"}),
        (["--run=s3://bucket/a=b"], {"run": "s3://bucket/a=b"}),
        (["--train.lr", "-0.1"], {"train": {"lr": -0.1}}),
        ([], {}),
    ],
)
def test_flags_become_a_tree(words: list[str], tree: dict[str, Any]) -> None:
    found = parse_flags(words)
    assert found == tree
    assert [type(v) for v in flatten(found).values()] == [type(v) for v in flatten(tree).values()]


@pytest.mark.parametrize("words", [["--train.lr", "3e-5"], ["--train.lr=3e-5"], ["--train.lr", "3E-05"]])
def test_exponents_are_numbers_where_a_number_belongs(words: list[str]) -> None:
    assert load_config(flags=words).config.train.lr == 3e-5
    assert load_config(flags=["--serve.token", "3e-5"]).config.serve.token == "3e-5"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train: {lr: 3e-5}", "train.lr", 3e-5),
        ("train: {lr: 3E-5}", "train.lr", 3e-5),
        ("train: {lr: 3.0e-5}", "train.lr", 3e-5),
        ("train: {betas: [9e-1, 95e-2]}", "train.betas", (0.9, 0.95)),
        ("target: {aux_layers: null}", "target.aux_layers", None),
        ("target: {aux_layers: [1, 3, 4]}", "target.aux_layers", (1, 3, 4)),
        ("drafter: {path: ~}", "drafter.path", None),
        ('serve: {token: "1234"}', "serve.token", "1234"),
        ('serve: {token: "3e5"}', "serve.token", "3e5"),
        ("serve: {token: '1.5e-3'}", "serve.token", "1.5e-3"),
        ("serve: {token: 3e5}", "serve.token", "3e5"),
        ("run: 1e5x", "run", "1e5x"),
        ("", "seed", 0),
    ],
)
def test_values_in_a_file_are_what_their_writer_meant(tmp_path: Path, text: str, key: str, value: Any) -> None:
    found = look_up(load_config(write(tmp_path / "run.yaml", text)).config, key)
    assert (found, type(found)) == (value, type(value))


def test_a_given_drafter_below_home_is_found_by_whoever_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    for given, path in (("~/d", "/home/x/d"), ("/d/~e", "/d/~e"), ("s3://b/d", "s3://b/d"), ("d", "d")):
        assert load_config(flags=["--drafter.path", given]).config.drafter.path == path


ODD = (
    "",
    " ",
    "null",
    "true",
    "1",
    "3e5",
    "a b",
    "a: b",
    "- x",
    "[x",
    "#",
    "a #b",
    "~",
    "~/x",
    "\n<t>\n",
    "\u2028",
    "ü",
    "{}",
    "@",
)


@pytest.mark.parametrize("seed", range(5))
def test_a_value_as_shown_is_taken_as_it_was(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    env, args = {f"N{i}": rng.choice(ODD) for i in range(9)}, rng.choices(ODD, k=9)
    flags = ["--serve.env", json.dumps(env), "--serve.args", json.dumps(args)]
    config = load_config(preset=FOUNDING, flags=flags).config
    rows = LoadedConfig(config, {}).rows()
    assert load_config(flags=[f"--{key}={as_yaml(value)}" for key, value, _ in rows]).config == config
    lines = [f"{k}: {as_yaml(v)}\n" for k, v in env.items()]
    (tmp_path / "run.yaml").write_text("serve:\n env:\n" + "".join(f"  {line}" for line in lines), encoding="utf-8")
    assert load_config(str(tmp_path / "run.yaml")).config.serve.env == env
