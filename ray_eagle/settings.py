"""Where settings come from, and which layer each effective value was set by.

Layers, later ones win: the defaults in `ray_eagle.config`, a preset (`preset: NAME` in the file, or `--preset NAME`), the
YAML file (`-c run.yaml`), flags (`--train.lr 3e-5`). Unknown keys are refused with the nearest known one.
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from ray_eagle.config import PRESETS, Config, Section
from ray_eagle.errors import ConfigError

SECRET = ("serve.token",)
HIDDEN = "(set)"


@dataclass(frozen=True)
class LoadedConfig:
    """The effective settings and, for each dotted key that a layer set, the layer."""

    config: Config
    origins: dict[str, str]

    def rows(self) -> list[tuple[str, Any, str]]:
        """Every dotted key with its effective value and where that came from; of a secret only that it is set."""
        values = flatten(self.config.model_dump())
        values |= {key: HIDDEN for key in SECRET if values[key]}
        return [(key, value, self.origins.get(key, "default")) for key, value in values.items()]


def load_config(file: str | None = None, preset: str | None = None, flags: list[str] | None = None) -> LoadedConfig:
    """Layer defaults, preset, file and flags, and validate.

    `flags` are command-line words: `--train.lr 3e-5`, `--train.lr=3e-5`, or `--train-anyway` (true).
    Raises ConfigError for an unreadable file, an unknown key or a value of the wrong type.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    in_file = _read_yaml(Path(file)) if file else {}
    if preset:  # it replaces the file's
        in_file = {key: value for key, value in in_file.items() if key != "preset"}
    else:
        preset = in_file.get("preset")
    if preset:
        layers.append((f"preset {preset}", {**_read_yaml(_preset_path(preset)), "preset": preset}))
    if file:
        layers.append((str(file), in_file))
    if flags:
        layers.append(("flag", parse_flags(flags)))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, layer in layers:
        _check_keys(Config, layer, name)
        _merge(merged, layer)
        origins.update(dict.fromkeys(flatten(layer), name))
    try:
        return LoadedConfig(Config.model_validate(merged), origins)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, origins) for e in error.errors())) from None


def parse_flags(words: list[str]) -> dict[str, Any]:
    """`["--train.epochs", "3"]` -> `{"train": {"epochs": 3}}`; values are read as YAML, dashes in names as underscores.

    YAML reads `3e-5` as text; the type of the setting decides later whether that is a number, so a token `1e5` stays text.
    """
    tree: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"command line: expected a setting like --train.lr 3e-5, found {word!r}.")
        name, separator, text = word[2:].partition("=")
        if not separator:
            text = queue.pop(0) if queue and not queue[0].startswith("--") else "true"
        *parents, leaf = name.replace("-", "_").split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(f"command line: {name}: {parent!r} was given a value of its own, {node!r}. Drop one.")
        node[leaf] = _scalar(name, text)
    return tree


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys; an empty one is a value of its own."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def as_yaml(value: Any) -> str:
    """A setting's value on one line, as files and flags take it: JSON, and plain text where it reads back as itself."""
    plain = to_jsonable_python(value)
    try:
        if isinstance(plain, str) and yaml.safe_load(plain) == plain:
            return plain
    except yaml.YAMLError:
        pass
    return json.dumps(plain, ensure_ascii=False)


def absolute_paths(config: Config) -> Config:
    """The same settings with absolute paths: jobs and workers run in directories of their own.

    URIs, `wheel:NAME` and `builtin` stay, and so does a cache below `~` (the home of the job's user may be another).
    """

    def update(section: Any, **values: Any) -> Any:
        return section.model_copy(update=values)

    return update(
        config,
        run=_absolute(config.run),
        target=update(
            config.target, path=_absolute(config.target.path), cache=_absolute(config.target.cache, home=True)
        ),
        drafter=update(config.drafter, path=_absolute(config.drafter.path)),
        generate=update(config.generate, prompts=_absolute(config.generate.prompts)),
        states=update(config.states, path=_absolute(config.states.path), masks=_absolute(config.states.masks)),
        probe=update(config.probe, prompts=_absolute(config.probe.prompts)),
    )


class _Once(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping: YAML's own loader would drop the first without a word."""

    where = ""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in first:
                    raise ConfigError(
                        f"{self.where}, line {line}: expected {key.value!r} once, found it in line {first[name]} too. "
                        "Merge the two, or drop one."
                    )
                first[name] = line
        return node


def _load_yaml(text: str, where: str) -> Any:
    """Raises ConfigError for a key that stands twice, YAMLError for what is not YAML."""
    loader = _Once(text)
    loader.where = where
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _scalar(name: str, text: str) -> Any:
    try:
        return _load_yaml(text, f"command line: {name}") if text else text
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {name}: not a YAML value: {text!r} ({error}). Quote it.") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = _load_yaml(path.read_text(encoding="utf-8"), f"config file {path}")
    except OSError as error:
        raise ConfigError(
            f"config file {path}: cannot be read ({error.strerror}). Name an existing YAML file."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: not valid YAML: {error}") from None
    if not isinstance(content or {}, dict):
        raise ConfigError(f"config file {path}: expected a mapping of settings, found {type(content).__name__}.")
    return content or {}


def _preset_path(name: Any) -> Path:
    path = PRESETS / f"{name}.yaml"
    if not path.exists():
        known = sorted(p.stem for p in PRESETS.glob("*.yaml"))
        raise ConfigError(
            f"preset {name!r} does not exist.{_nearest(str(name), known)} Known presets: {', '.join(known)}."
        )
    return path


def _merge(into: dict[str, Any], layer: dict[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = {**value} if isinstance(value, dict) else value


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            keys += _known_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _check_keys(section: type[BaseModel], layer: dict[str, Any], where: str, prefix: str = "") -> None:
    for key, value in layer.items():
        field = section.model_fields.get(key)
        dotted = f"{prefix}{key}"
        if field is None:
            elsewhere = {known.rpartition(".")[2]: known for known in _known_keys(Config)}
            name = str(key)  # YAML reads `on:` as a boolean
            close = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.6)
            close = (
                [prefix + close[0]] if close else [elsewhere[k] for k in difflib.get_close_matches(name, elsewhere, 1)]
            )
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{where}: unknown setting {dotted!r}.{hint} `ray-eagle config show` lists all.")
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {dotted!r} is a group of settings, found {value!r}. Use {dotted}.NAME.")
            _check_keys(kind, value, where, f"{dotted}.")
        elif isinstance(value, bool) and kind not in (
            bool,
            bool | None,
        ):  # a flag without its value; as a number it would be 1
            raise ConfigError(f"{where}: {dotted}: expected a value, found {str(value).lower()}.")


def _explain(error: Any, origins: dict[str, str]) -> str:
    location = [part for part in error["loc"] if isinstance(part, str)]
    key = ".".join(location)
    inside = [origin for name, origin in origins.items() if name.startswith(f"{key}.")]  # a rule of a whole group
    where = origins.get(key) or (inside or ["settings"])[-1]
    return f"{where}: {key or 'settings'}: {error['msg']}, found {error.get('input')!r}."


def _absolute(path: str | None, *, home: bool = False) -> str | None:
    """`home`: a path below ~ is the job's own, and stays."""
    if not path or path == "builtin" or path.startswith("wheel:") or "://" in path or (home and path.startswith("~")):
        return path
    return str(Path(path).expanduser().absolute())
