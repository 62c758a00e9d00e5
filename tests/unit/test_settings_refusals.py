"""Settings that are refused: which message names what, where it was given, and the way out."""

import json
from pathlib import Path

import pytest
import yaml

from ray_eagle.errors import ConfigError
from ray_eagle.settings import load_config
from tests.unit.test_settings import write


def refusal(*, file: str | None = None, flags: list[str] | None = None, preset: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, preset, flags)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("train: {learning_rte: 1}", "train.learning_rte", None),
        ("train: {epoch: 1}", "train.epoch", "train.epochs"),
        ("train: {warmup_shar: 0.1}", "train.warmup_shar", "train.warmup_share"),
        ("tarin: {lr: 1}", "tarin", "train"),
        ("epochs: 3", "epochs", "train.epochs"),
        ("generate: {tokens_per_batch: 3}", "generate.tokens_per_batch", "extract.tokens_per_batch"),
        ("qqqqqqqq: 3", "qqqqqqqq", None),
        ("on: 3", True, None),
        ("1: 3", 1, None),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_known_one(
    tmp_path: Path, text: str, key: object, nearest: str | None
) -> None:
    file = write(tmp_path / "run.yaml", text)
    message = refusal(file=file)
    assert message.startswith(f"{file}: unknown setting '{key}'.")
    if nearest:
        assert f"Did you mean '{nearest}'?" in message


def test_unknown_flag_is_refused_with_the_nearest_known_one() -> None:
    assert "flag: unknown setting 'train.eposchs'. Did you mean 'train.epochs'?" in refusal(flags=["--train.eposchs=1"])
    assert "flag: unknown setting 'traim_anyway'. Did you mean 'train_anyway'?" in refusal(flags=["--traim-anyway"])
    assert refusal(flags=["--train.lr.peak", "1"]).startswith("flag: train.lr: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.lr", "fast"),
        ("train.lr", 0),
        ("train.lr", -1),
        ("train.lr", "1e400"),
        ("train.lr", "nan"),
        ("generate.temperature", "inf"),
        ("train.epochs", 2.5),
        ("train.epochs", 0),
        ("train.epochs", [1]),
        ("train.warmup_share", 1),
        ("generate.held_out_share", -0.1),
        ("train.compute_dtype", "float16"),
        ("target.aux_layers", [1, 2]),
        ("target.aux_layers", [1, 2, 3, 4]),
        ("target.aux_layers", 3),
        ("breakeven.steps", [1, 0]),
        ("serve.port", 65536),
        ("probe.confidence", 0.5),
        ("serve.token", 1234),
        ("serve.token", ""),
        ("run", 3),
        ("seed", None),
        ("train.use_gpu", "maybe"),
        ("train.lr", {"peak": 1}),
    ],
)
def test_wrong_value_is_named_with_its_key_its_layer_and_itself(tmp_path: Path, key: str, value: object) -> None:
    section, _, leaf = key.rpartition(".")
    file = write(tmp_path / "run.yaml", yaml.safe_dump({section: {leaf: value}} if section else {leaf: value}))
    by_flag = refusal(flags=[f"--{key}={json.dumps(value)}"])
    for where, message in ((file, refusal(file=file)), ("flag", by_flag)):
        assert message.startswith(f"{where}: {key}: "), message
        assert f"found {value!r}." in message or isinstance(value, list)


@pytest.mark.parametrize(
    ("words", "expected"), [([], None), (["--train.compile"], True), (["--train.compile", "false"], False)]
)
def test_a_switch_may_be_left_open(tmp_path: Path, words: list[str], expected: bool | None) -> None:
    assert load_config(flags=words).config.train.compile is expected
    file = write(
        tmp_path / "run.yaml", f"train: {{compile: {'null' if expected is None else str(expected).lower()}}}\n"
    )
    assert load_config(file).config.train.compile is expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--breakeven.steps", "[]"], "flag: breakeven: Value error, steps and sweep are both empty"),
        (
            ["--generate.held_out_share", "0.6", "--generate.validation_share", "0.6"],
            "flag: generate: Value error, held_out_share and validation_share are 1.2 together: nothing is left to train on",
        ),
        (
            ["--generate.held_out_share", "0.9"],
            "flag: generate: Value error, held_out_share and validation_share are 1 tog",
        ),
    ],
)
def test_settings_that_leave_nothing_to_do_are_refused(words: list[str], reason: str) -> None:
    assert refusal(flags=words).startswith(reason)


def test_a_sweep_may_stand_in_the_place_of_steps() -> None:
    loaded = load_config(flags=["--breakeven.steps", "[]", "--breakeven.sweep", "[{steps: 2}]"])
    assert loaded.config.breakeven.steps == ()


def test_every_wrong_value_is_named_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "train: {lr: -1, epochs: 0}\n")
    lines = refusal(file=file, flags=["--seed", "x"]).splitlines()
    assert sorted(line.split(": ")[1] for line in lines) == ["seed", "train.epochs", "train.lr"]


@pytest.mark.parametrize("words", [["--train.lr"], ["--train.epochs", "--seed", "3"], ["--train.lr", "true"]])
def test_a_number_without_its_value_is_not_taken_for_one(words: list[str]) -> None:
    assert refusal(flags=words).endswith("expected a value, found true.")


@pytest.mark.parametrize("value", ["3", "null", "[1]", "fast"])
def test_a_group_given_a_scalar_is_refused(tmp_path: Path, value: str) -> None:
    file = write(tmp_path / "run.yaml", f"train: {value}\n")
    assert f"{file}: 'train' is a group of settings" in refusal(file=file)
    assert "flag: 'train' is a group of settings" in refusal(flags=["--train", value])


def test_half_of_two_settings_that_belong_together_is_refused_where_it_was_given(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "breakeven: {cycle_ms: 30}\n")
    message = refusal(file=file)
    assert message.startswith(f"{file}: breakeven: ")
    assert "give both or neither" in message
    assert load_config(file, flags=["--breakeven.baseline_tps", "82"]).config.breakeven.cycle_ms == 30


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train.lr", "3"], "found 'train.lr'"),
        (["--seed", "1", "2"], "found '2'"),
        (["--target.aux_layers", "[1,2"], "target.aux_layers: not a YAML value"),
        (["--train", "3", "--train.lr", "3"], "'train' was given a value of its own"),
    ],
)
def test_malformed_command_line_is_refused(words: list[str], part: str) -> None:
    message = refusal(flags=words)
    assert message.startswith("command line: ")
    assert part in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"train: {lr: 1", "not valid YAML"),
        (b"a: b: c\n", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"- 1\n- 2\n", "expected a mapping of settings, found list"),
        (b"fast\n", "expected a mapping of settings, found str"),
        (b"!!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, content: bytes, part: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    message = refusal(file=str(file))
    assert message.startswith(f"config file {file}: ")
    assert part in message


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("train: {lr: 1}\nseed: 2\ntrain: {epochs: 3}\n", "train", (1, 3)),
        ("train:\n  lr: 1\n  'lr': 2\n", "lr", (2, 3)),
        ("serve: {env: {A: x, B: y, A: z}}\n", "A", (1, 1)),
        ("probe:\n  sweep:\n  - steps: 1\n    steps: 2\n", "steps", (3, 4)),
    ],
)
def test_a_key_said_twice_is_named_with_both_lines(tmp_path: Path, text: str, key: str, lines: tuple[int, int]) -> None:
    file = write(tmp_path / "run.yaml", text)
    expected = f"config file {file}, line {lines[1]}: expected '{key}' once, found it in line {lines[0]} too. "
    assert refusal(file=file).startswith(expected)


def test_only_keys_of_one_mapping_meet(tmp_path: Path) -> None:
    text = "generate: &a {actors: 2, cpus: 3}\nextract: {<<: *a, cpus: 4}\nserve: {env: {actors: x}}\n"
    config = load_config(write(tmp_path / "run.yaml", text)).config
    assert (config.extract.actors, config.extract.cpus, config.generate.cpus) == (2, 4, 3)
    assert "command line: serve.env, line 1: expected 'A' once" in refusal(flags=["--serve.env", "{A: x, A: y}"])


def test_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no.yaml", tmp_path):
        assert refusal(file=str(path)).startswith(f"config file {path}: cannot be read")


def test_unknown_preset_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    message = refusal(preset="kimi-k2")
    assert message.startswith("preset 'kimi-k2' does not exist. Did you mean 'kimi-k2.5'?")
    assert "smollm2-cpu" in message
    for value in ("3", "[a]", "{a: b}"):
        assert "does not exist" in refusal(file=write(tmp_path / "b.yaml", f"preset: {value}"))
