"""What ships: the presets, the documentation of every setting, and `config show`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from ray_eagle.cli import app
from ray_eagle.config import PRESETS, Config, Section
from ray_eagle.settings import flatten, load_config
from tests.unit.test_settings import FOUNDING, look_up, origin, write


def sections(kind: type[BaseModel] = Config) -> list[type[Section]]:
    inner = [f.annotation for f in kind.model_fields.values()]
    return [Config, *(s for s in inner if isinstance(s, type) and issubclass(s, Section))]


# --- what ships -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(p.stem for p in PRESETS.glob("*.yaml")))
def test_every_preset_loads_and_all_that_it_says_is_in_effect(name: str) -> None:
    loaded = load_config(preset=name)
    said = flatten(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))
    assert said
    for key, value in said.items():
        found = look_up(loaded.config, key)
        assert found == (tuple(value) if isinstance(value, list) else value)
        assert origin(loaded, key) == f"preset {name}"


def test_the_founding_preset_holds_the_founding_numbers() -> None:
    config = load_config(preset=FOUNDING).config
    found = {
        "epochs": config.train.epochs,
        "lr": config.train.lr,
        "warm-up": config.train.warmup_share,
        "K": config.train.unroll_steps,
        "noise": (config.train.noise, config.train.noise_kind),
        "validation": config.generate.validation_share,
        "tokens": config.extract.max_length,
        "aux layers": config.target.aux_layers,
        "vocab": config.vocab.size,
        "samples": config.generate.limit,
        "baseline": config.breakeven.baseline_tps,
        "cycle": config.breakeven.cycle_ms,
    }
    assert found == {
        "epochs": 5,
        "lr": 3e-5,
        "warm-up": 0.01,
        "K": 3,
        "noise": (0.05, "uniform"),
        "validation": 0.1,
        "tokens": 2048,
        "aux layers": (2, 30, 58),
        "vocab": 32000,
        "samples": 10000,
        "baseline": 82,
        "cycle": 30,
    }


def test_every_setting_is_documented() -> None:
    silent = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if not (field.description or "").strip()
        and not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    ]
    assert len(sections()) == 13
    assert silent == []
    assert all(section.__doc__ for section in sections())


# --- the command ----------------------------------------------------------------------------------------------------


def show(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray_eagle", "config", "show", *words]
    return subprocess.run(command, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=60)


def test_config_show_prints_every_value_and_its_origin(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", f"preset: {FOUNDING}\nseed: 11\n")
    words = ["-c", file, "--train.lr", "3e-4", "--train-anyway"]
    expected = load_config(file, flags=words[2:])

    done = show(*words, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert {key: (row["value"], row["from"]) for key, row in rows.items()} == {
        key: (list(value) if isinstance(value, tuple) else value, where) for key, value, where in expected.rows()
    }
    assert rows["train.lr"] == {"value": 3e-4, "from": "flag"}

    done = show(*words)
    assert done.returncode == 0
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert ["train.lr", "0.0003", "flag"] in lines
    assert ["seed", "11", file] in lines
    assert ["vocab.size", "32000", f"preset {FOUNDING}"] in lines
    assert ["train.clip", "1.0", "default"] in lines


def test_a_secret_is_shown_neither_in_the_table_nor_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--json"]):
        app(["config", "show", "--serve.token", "s3cret", *words], standalone_mode=False)
        out = capsys.readouterr().out
        assert "s3cret" not in out and "(set)" in out
    assert ("serve.token", None, "default") in load_config().rows()


def test_wrong_settings_exit_with_2_and_one_line(tmp_path: Path) -> None:
    done = show("--train.eposchs", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: flag: unknown setting 'train.eposchs'. Did you mean 'train.epochs'?")
    assert len(done.stderr.splitlines()) == 1
