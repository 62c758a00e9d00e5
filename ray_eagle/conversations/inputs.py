"""Input files, chunk by chunk in constant memory: JSONL, JSON, Parquet, Arrow, text lines, and hub datasets.

A chunk holds rows as they lie in the file (lines, a record batch); they are decoded where the chunk is worked on. What a chunk
holds depends on the file alone. Row numbers count from 1; in a text or JSONL file they are line numbers.
"""

import codecs
import hashlib
import importlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.ipc
import pyarrow.parquet as pq

from ray_eagle.config import PRESETS
from ray_eagle.conversations.messages import RowError, Shape, detect_shape
from ray_eagle.errors import InputError

BUILTIN = PRESETS / "prompts.jsonl"
CHUNK_ROWS = 500
CHUNK_BYTES = 4 << 20
READ_BYTES = 1 << 20
DETECT_ROWS = 100
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of an input. One of `lines`, `arrow` and `values` is set."""

    index: int
    numbers: tuple[int, ...]
    """Of each row, from 1."""
    lines: tuple[bytes, ...] | None = None
    """Undecoded lines; with `text`, each is a prompt by itself."""
    text: bool = False
    arrow: bytes | None = None
    """An IPC stream: pickled slices would drag their whole batch along."""
    values: tuple[Any, ...] | None = None

    def rows(self) -> Iterator[tuple[int, Any | RowError]]:
        """(row number, what stands there); a RowError in place of a row that cannot be decoded."""
        if self.lines is not None:
            found: Any = (_decoded(line, self.text) for line in self.lines)
        elif self.arrow is not None:
            found = pa.ipc.open_stream(self.arrow).read_all().to_pylist()
        else:
            found = self.values
        yield from zip(self.numbers, found, strict=True)


def _decoded(line: bytes, text: bool) -> Any | RowError:
    try:
        decoded = line.decode("utf-8-sig")
        return decoded.rstrip("\r") if text else json.loads(decoded)
    except UnicodeDecodeError as error:
        return RowError(f"expected UTF-8, found other bytes ({error})")
    except (ValueError, RecursionError) as error:
        return RowError(f"broken JSON ({error})")


def read_chunks(source: str, limit: int | None = None) -> Iterator[Chunk]:
    """The rows of a file, URI, `builtin` or `hub://NAME[:SPLIT]`, at most `limit`; blank lines are no rows.

    Raises InputError when the source cannot be read, holds no row, or its kind is not known.
    """
    chunks = _chunks(source, limit)
    first = next(chunks, None)
    if first is None:
        raise InputError(f"prompts file {source}: expected rows, found none: it is empty. Write it again, or copy it.")
    yield first
    yield from chunks


def _chunks(source: str, limit: int | None) -> Iterator[Chunk]:
    if source.startswith("hub:"):
        yield from _of_values(_hub_rows(source), limit)
        return
    fs, path = _place(source)
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSED
    kind = (suffixes[:-1] if compressed else suffixes)[-1:] or [""]
    try:
        match kind[0]:
            case ".parquet":
                with fs.open_input_file(path) as file:
                    yield from _of_batches(pq.ParquetFile(file).iter_batches(batch_size=CHUNK_ROWS), limit)
            case ".arrow" | ".feather" | ".ipc":
                with fs.open_input_file(path) as file:
                    yield from _of_batches(_arrow_batches(file), limit)
            case ".json":
                with fs.open_input_stream(path) as stream:
                    yield from _of_json(stream.read(), limit, source)
            case ".jsonl" | ".ndjson" | ".txt" | "":
                with fs.open_input_stream(path, buffer_size=READ_BYTES) as stream:
                    yield from _of_lines(_utf8_blocks(stream, source), limit, text=kind[0] == ".txt")
            case _:
                raise InputError(
                    f"prompts file {source}: expected .jsonl, .json, .parquet, .arrow or .txt, found {kind[0]}. Rename or "
                    "convert it."
                )
    except pa.ArrowException as error:
        raise InputError(f"prompts file {source} is damaged ({error}). Copy it again.") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(
            f"prompts file {source} cannot be read ({why}). Check generate.prompts, or probe.prompts if it is that."
        ) from None


def shape_of(source: str, asked: str) -> Shape:
    """`asked`, or with `auto` what the first rows look like. Raises InputError when that is nothing known."""
    if asked != "auto":
        return asked  # type: ignore[return-value]
    rows = [row for chunk in read_chunks(source, DETECT_ROWS) for _, row in chunk.rows()]
    found = [row for row in rows if not isinstance(row, RowError)]
    if not found:
        raise InputError(
            f"prompts file {source}: expected rows, found none that can be decoded: {rows[0]}. Convert the file, or copy it "
            "again."
        )
    return detect_shape(found, f"prompts file {source}")


def source_hash(source: str) -> str:
    """Hash of the file's content, read in pieces; of the name for a hub dataset."""
    if source.startswith("hub:"):
        return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
    fs, path = _place(source)
    digest = hashlib.blake2b(digest_size=8)
    try:
        with fs.open_input_stream(path, compression=None) as stream:
            while piece := stream.read(READ_BYTES):
                digest.update(piece)
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(
            f"prompts file {source} cannot be read ({why}). Check generate.prompts, or probe.prompts if it is that."
        ) from None
    return digest.hexdigest()


def count_rows(source: str, limit: int | None = None) -> int:
    """Rows of a source, whatever is in them."""
    return sum(len(chunk.numbers) for chunk in read_chunks(source, limit))


def _place(source: str) -> tuple[pafs.FileSystem, str]:
    if source == "builtin":
        return pafs.LocalFileSystem(), str(BUILTIN)
    if "://" in source:
        try:
            return pafs.FileSystem.from_uri(source)
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"prompts file {source} cannot be read ({error}). Check generate.prompts, or probe.prompts if it is that."
            ) from None
    path = Path(source).expanduser()
    try:
        path.open("rb").close()  # for the plain reason: a folder, not there, not allowed
    except OSError as error:
        raise InputError(
            f"prompts file {path} cannot be read ({error.strerror}). Check generate.prompts, or probe.prompts if it is that."
        ) from None
    return pafs.LocalFileSystem(), str(path.absolute())


def _of_lines(blocks: Iterator[bytes], limit: int | None, *, text: bool) -> Iterator[Chunk]:
    numbered = ((number, line) for number, line in enumerate(_lines(blocks), 1) if line.strip())
    numbers: list[int] = []
    lines: list[bytes] = []
    size = index = 0
    for number, line in itertools.islice(numbered, limit):
        numbers.append(number)
        lines.append(line)
        size += len(line)
        if len(lines) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(index, tuple(numbers), tuple(lines), text)
            numbers, lines, size, index = [], [], 0, index + 1
    if lines:
        yield Chunk(index, tuple(numbers), tuple(lines), text)


def _utf8_blocks(stream: Any, source: str) -> Iterator[bytes]:
    """Raises InputError for a file that begins with the mark of another encoding: each of its lines would be broken."""
    block = stream.read(READ_BYTES)
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(
            f"prompts file {source}: expected UTF-8, found the mark of UTF-16 at its start. Convert it: iconv -f UTF-16 -t UTF-8."
        )
    while block:
        yield block
        block = stream.read(READ_BYTES)


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Split at \\n alone: JSON may hold U+2028 and its like as they are."""
    pieces: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        pieces.append(first)
        for other in others:
            yield b"".join(pieces)
            pieces = [other]
    yield b"".join(pieces)


def _of_json(data: bytes, limit: int | None, source: str) -> Iterator[Chunk]:
    """A list of rows, or one object that holds a single list of them; read whole."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"prompts file {source}: expected JSON, found {error}. A file with one object a line is .jsonl; a file cut short has "
            "to be copied again."
        ) from None
    if isinstance(value, dict):
        lists = [inner for inner in value.values() if isinstance(inner, list) and inner and isinstance(inner[0], dict)]
        value = lists[0] if len(lists) == 1 and "messages" not in value and "conversations" not in value else [value]
    if not isinstance(value, list):
        raise InputError(
            f"prompts file {source}: expected a list of rows, found {type(value).__name__}. Wrap the rows in [ ]."
        )
    yield from _of_values(iter(value), limit)


def _of_values(values: Iterator[Any], limit: int | None) -> Iterator[Chunk]:
    values = itertools.islice(values, limit)
    first = 1
    for index in itertools.count():
        rows = tuple(itertools.islice(values, CHUNK_ROWS))
        if not rows:
            return
        yield Chunk(index, tuple(range(first, first + len(rows))), values=rows)
        first += len(rows)


def _arrow_batches(file: Any) -> Iterator[pa.RecordBatch]:
    """Of the file format or of the stream format (what `datasets` keeps)."""
    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from pa.ipc.open_stream(file)


def _of_batches(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[Chunk]:
    first, index = 1, 0
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            size = min(CHUNK_ROWS, batch.num_rows - start, *([] if limit is None else [limit - first + 1]))
            if size <= 0:
                return
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch.slice(start, size))
            yield Chunk(index, tuple(range(first, first + size)), arrow=sink.getvalue().to_pybytes())
            first, index = first + size, index + 1


def _hub_rows(source: str) -> Iterator[Any]:
    name, _, split = source.removeprefix("hub:").removeprefix("//").partition(":")
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError:
        raise InputError(
            f"prompts {source}: datasets of the hub need the package datasets, which is not installed. pip install 'ray-eagle[datasets]', or "
            "download the file and name its path."
        ) from None
    try:
        yield from load_dataset(name, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        raise InputError(f"prompts {source} cannot be loaded ({error}). Check name and split.") from None
