"""A run folder: where each artifact lies, on any filesystem of pyarrow.fs, and what it was made from.

Every stage owns one folder. Its `origin.json` names the settings and inputs that the artifact is made from, from the
moment the stage starts; `finished` is set when the stage is done. A stage compares it with what it would make now, so
nothing stale is ever reused and nothing half-made is ever taken for whole.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.fs as pafs
from pydantic import BaseModel, ValidationError

from ray_eagle.errors import ConfigError, InputError, OriginError, explain
from ray_eagle.settings import flatten

FOLDERS = {
    "preflight": "preflight",
    "breakeven": "probes/breakeven",
    "probe-given": "probes/given",
    "generate": "conversations",
    "extract": "hidden_states",
    "vocab": "vocab",
    "train": "drafter",
    "probe": "probes/trained",
    "report": "report",
}
CHECKPOINTS = "checkpoints"
LOGS = "logs"


class Origin(BaseModel):
    """What an artifact was made from, and what making it took."""

    stage: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    """Stage or file -> key of what was read."""
    target: dict[str, str]
    """Fingerprints of the target's config, weights index, tokenizer and chat template."""
    target_path: str = ""
    """Where the target was; not part of the key, since a folder may move."""
    versions: dict[str, str] = {}
    content: str = ""
    """Hash of what the stage made, once it is finished: a redo that gives something else is a new input downstream."""
    finished: str | None = None
    """UTC time; None while the stage is not done."""
    seconds: float = 0.0
    bytes: int = 0
    samples: int = 0
    tokens: int = 0

    @property
    def key(self) -> str:
        """Hash of everything that decides the content."""
        return content_hash(
            {"stage": self.stage, "settings": self.settings, "inputs": self.inputs, "target": self.target}
        )


def content_hash(value: Any) -> str:
    """16 hex digits of the BLAKE2 hash of a JSON value (keys sorted)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Folder:
    """A folder on any filesystem that pyarrow.fs reaches. Writes are atomic: an object is whole or absent."""

    def __init__(self, fs: pafs.FileSystem, path: str, uri: str = "") -> None:
        self.fs = fs
        self.path = path.rstrip("/")
        self.uri = uri or self.path
        """What `at` opens again, on any machine that sees it."""

    @classmethod
    def at(cls, uri: str | os.PathLike[str]) -> "Folder":
        """From a URI (`s3://bucket/run`) or a local path. Raises ConfigError for a URI of no known kind."""
        text = os.fspath(uri)
        if "://" in text:
            try:
                fs, path = pafs.FileSystem.from_uri(text)
            except pa.ArrowInvalid as error:
                fix = "Write a path, or a URI that pyarrow reads (s3://, gs://, hdfs://)."
                raise ConfigError(
                    explain("no folder", where=text, expected="the URI of a folder", found=error, fix=fix)
                ) from None
            return cls(fs, path, text)
        return cls(pafs.LocalFileSystem(), str(Path(text).expanduser().absolute()))

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, pafs.LocalFileSystem)

    def folder(self, name: str) -> "Folder":
        return Folder(self.fs, f"{self.path}/{name}", self.place(name))

    def place(self, name: str) -> str:
        """Path or URI of something inside, the options of an object store kept at its end."""
        base, mark, options = self.uri.partition("?")
        return f"{base.rstrip('/')}/{name}{mark}{options}"

    def file(self, name: str) -> str:
        return f"{self.path}/{name}"

    def disk(self) -> Path | None:
        """The folder that exists, this or one above, whose disk it lies on; None on other filesystems than the local."""
        return next(p for p in (Path(self.path), *Path(self.path).parents) if p.exists()) if self.is_local else None

    def create(self) -> None:
        if self.is_local:  # pathlib's errors know which path is in the way
            Path(self.path).mkdir(parents=True, exist_ok=True)
        else:
            self.fs.create_dir(self.path, recursive=True)

    def exists(self, name: str = "") -> bool:
        path = self.file(name) if name else self.path
        return self.fs.get_file_info(path).type != pafs.FileType.NotFound

    def stamp(self, name: str) -> tuple[int | None, int | None] | None:
        """Length and time of the last change of a file: while they stay, so does its content. None without a file."""
        info = self.fs.get_file_info(self.file(name))
        return None if info.type == pafs.FileType.NotFound else (info.size, info.mtime_ns)

    def names(self) -> list[str]:
        """Names of the files directly inside, sorted; empty if the folder does not exist."""
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        return sorted(info.base_name for info in self.fs.get_file_info(selector) if info.type == pafs.FileType.File)

    def size(self) -> int:
        """Bytes of all files below."""
        selector = pafs.FileSelector(self.path, recursive=True, allow_not_found=True)
        return sum(info.size or 0 for info in self.fs.get_file_info(selector) if info.type == pafs.FileType.File)

    def read_bytes(self, name: str) -> bytes:
        """Raises InputError when it is missing."""
        try:
            with self.fs.open_input_stream(self.file(name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            raise InputError(f"{self.file(name)} does not exist.") from None

    def write_bytes(self, name: str, data: bytes) -> None:
        """Atomic: locally through a synced temporary file and a rename, elsewhere as one object."""
        if not self.is_local:
            with self.fs.open_output_stream(self.file(name)) as stream:
                stream.write(data)
            return
        final = Path(self.file(name))
        final.parent.mkdir(parents=True, exist_ok=True)
        with replacing(final) as stream:
            stream.write(data)

    def read_json(self, name: str) -> Any:
        """Raises InputError when it is missing or not JSON."""
        try:
            return json.loads(self.read_bytes(name))
        except ValueError as error:
            raise InputError(f"{self.file(name)} is not valid JSON ({error}). Restore it, or redo its stage.") from None

    def write_json(self, name: str, value: Any) -> None:
        self.write_bytes(name, (json.dumps(value, indent=1) + "\n").encode())

    def read_jsonl(self, name: str) -> list[Any]:
        """One JSON value a line; raises InputError that names a broken line."""
        rows: list[Any] = []
        data = self.read_bytes(name)
        # not splitlines: texts hold U+2028 and its like as they are
        for number, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else [], 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"{self.file(name)}, line {number}: not valid JSON ({error}).") from None
        return rows

    def write_jsonl(self, name: str, rows: list[Any]) -> None:
        self.write_bytes(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())

    def delete(self, last: str = "") -> None:
        """Remove the folder and everything in it, the file `last` after all others."""
        if last:
            selector = pafs.FileSelector(self.path, allow_not_found=True)
            for info in self.fs.get_file_info(selector):
                if info.type == pafs.FileType.Directory:
                    self.fs.delete_dir(info.path)
                elif info.base_name != last:
                    self.fs.delete_file(info.path)
        if self.exists():
            self.fs.delete_dir(self.path)

    def delete_file(self, name: str) -> None:
        self.fs.delete_file(self.file(name))


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[BinaryIO]:
    """A file that appears whole at `final` or not at all: a temporary one, synced and renamed. OSErrors name `final`."""
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(final)
    except BaseException as error:
        # where nothing can be written nothing can be deleted: the first error counts
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(final)) from None
        raise


def sync(path: Path) -> None:
    """Have the filesystem keep a file, or the names in a folder, through a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class RunFolder(Folder):
    """The folder of one run: one subfolder a stage."""

    @classmethod
    def open(cls, uri: str, *, in_job: bool = False) -> "RunFolder":
        """Raises ConfigError without a folder, or in a job for a relative path (each job has its own working directory)."""
        if not uri:
            raise ConfigError("no run folder: set `run: FOLDER` in the config file, or pass --run FOLDER.")
        if in_job and "://" not in uri and not Path(uri).is_absolute():
            raise ConfigError(
                f"run folder {uri!r} is relative, but a job runs in a directory of its own. Expected an absolute path or a "
                "URI that every node sees: write one as `run`, or submit with `ray-eagle STAGE --address URL`, which "
                "resolves it first."
            )
        folder = Folder.at(uri)
        there = folder.disk()
        if there and not there.is_dir():
            fix = "Name another run folder (--run), or move that file away."
            raise ConfigError(
                explain("run folder", where=folder.path, expected="a folder", found=f"a file at {there}", fix=fix)
            )
        return cls(folder.fs, folder.path, folder.uri)

    def of(self, stage: str) -> Folder:
        """The folder that a stage writes."""
        return self.folder(FOLDERS[stage])

    def origin(self, stage: str) -> Origin | None:
        """What the stage's artifact was made from; None when it was never started. Raises InputError when damaged."""
        folder = self.of(stage)
        if not folder.exists("origin.json"):
            return None
        try:
            return Origin.model_validate(folder.read_json("origin.json"))
        except ValidationError as error:
            fault = error.errors()[0]
            raise InputError(
                f"{folder.file('origin.json')} is damaged ({'.'.join(map(str, fault['loc']))}: {fault['msg']}). Redo its "
                f"stage: `ray-eagle {stage} --redo`."
            ) from None

    def finished(self, stage: str) -> Origin | None:
        origin = self.origin(stage)
        return origin if origin and origin.finished else None

    def write_origin(self, origin: Origin) -> None:
        self.of(origin.stage).write_json("origin.json", origin.model_dump())

    def input_key(self, stage: str) -> str:
        """Key and content of a finished upstream stage, as one hash; raises OriginError when it is not done."""
        origin = self.finished(stage)
        if origin is None:
            state = "is not finished" if self.origin(stage) else "was not made"
            raise OriginError(f"{self.of(stage).path} {state} yet. Run `ray-eagle {stage}` first (or `ray-eagle run`).")
        return content_hash([origin.key, origin.content])


def differences(old: Origin, new: Origin) -> list[str]:
    """The settings, inputs and fingerprints in which two origins differ, as `name: old -> new`."""
    lines = []
    for group in ("settings", "inputs", "target"):
        before, now = _flat(getattr(old, group)), _flat(getattr(new, group))
        for key in sorted({*before, *now}):
            old_value, new_value = before.get(key, "absent"), now.get(key, "absent")
            if old_value != new_value:  # a setting of a later version may be null here and absent there
                lines.append(f"{group}.{key}: {old_value!r} -> {new_value!r}")
    return lines


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Without empty dicts: a first entry is the difference, not that there was none."""
    return {key: list(v) if isinstance(v, tuple) else v for key, v in flatten(tree).items() if v != {}}
