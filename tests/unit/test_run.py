"""A run folder: whole files or none, and what each artifact was made from."""

import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_eagle.errors import ConfigError, InputError, OriginError
from ray_eagle.run import Folder, Origin, RunFolder, content_hash, differences

# --- files ----------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder.at(tmp_path)
    folder.write_bytes("a", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk: the write ends in the middle
    try:
        with pytest.raises(OSError, match="too large") as caught:
            folder.write_bytes("a", b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.read_bytes("a") == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert caught.value.filename == str(tmp_path / "a")  # a failed write names no file by itself
    with pytest.raises(TypeError):
        folder.write_json("a", {1, 2})
    assert folder.read_bytes("a") == b"old"


def test_the_first_error_of_a_write_is_told_not_that_of_tidying_up(tmp_path: Path) -> None:
    name = "a" * 250  # its temporary file's name is too long to make, and to delete
    with pytest.raises(OSError, match="too long") as caught:
        Folder.at(tmp_path).write_bytes(name, b"x")
    assert caught.value.filename == str(tmp_path / name)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    folder = Folder.at(tmp_path)
    versions = {bytes([65 + i]) * (200_000 + i) for i in range(3)}
    folder.write_bytes("a", min(versions))

    def write() -> None:
        for i in range(60):
            folder.write_bytes("a", sorted(versions)[i % 3])

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while writer.is_alive():
        seen.add(folder.read_bytes("a"))
    writer.join()
    assert seen
    assert seen <= versions


ODD = "a\u2028b\u2029c\u0085d\x0be\x1cf\r\ng \U0001f985 \\n"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_is_read(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = [{"text": "".join(rng.choices(ODD, k=9)), "n": [rng.random(), None]} for _ in range(rng.randint(0, 5))]
    for folder in (Folder.at(tmp_path / "x").folder("y"), Folder.at(f"file://{tmp_path}/x/y")):
        folder.write_jsonl("rows", rows)
        assert folder.read_jsonl("rows") == rows
        folder.write_json("one", {"rows": rows})
        assert folder.read_json("one") == {"rows": rows}
        assert folder.names() == ["one", "rows"]
        assert folder.size() == sum(p.stat().st_size for p in (tmp_path / "x" / "y").iterdir())
    folder.delete()
    assert not (tmp_path / "x" / "y").exists()
    assert folder.names() == []
    folder.delete()


@pytest.mark.parametrize(
    ("content", "read", "part"),
    [
        (None, Folder.read_json, "/f does not exist."),
        (None, Folder.read_jsonl, "/f does not exist."),
        (b"{", Folder.read_json, "/f is not valid JSON ("),
        (b"\xff\xfe\x00", Folder.read_json, "/f is not valid JSON ("),
        (b"1\n2\n{\n4\n", Folder.read_jsonl, "/f, line 3: not valid JSON ("),
        (b'1\n"\xff"\n', Folder.read_jsonl, "/f, line 2: not valid JSON ("),
        (b"1\n\n2\n", Folder.read_jsonl, "/f, line 2: not valid JSON ("),
        (b'1\n{"a": ', Folder.read_jsonl, "/f, line 2: not valid JSON ("),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, read: Callable[[Folder, str], Any], part: str
) -> None:
    if content is not None:
        (tmp_path / "f").write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(Folder.at(tmp_path), "f")
    assert f"{tmp_path}{part}" in str(caught.value)


def test_a_relative_run_folder_is_refused_in_a_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"run folder 'runs/x' is relative.*Expected an absolute path or a URI"):
        RunFolder.open("runs/x", in_job=True)
    assert RunFolder.open("runs/x").path == str(tmp_path / "runs" / "x")
    assert RunFolder.open(str(tmp_path / "x"), in_job=True).path == str(tmp_path / "x")
    assert RunFolder.open(f"file://{tmp_path}/x", in_job=True).path == str(tmp_path / "x")
    with pytest.raises(ConfigError, match="no run folder"):
        RunFolder.open("")


# --- origins --------------------------------------------------------------------------------------------------------


def test_the_key_depends_on_all_that_decides_the_content_and_on_nothing_else() -> None:
    origin = Origin(stage="vocab", settings={"a": {"b": 1, "c": [2]}}, inputs={"extract": "k"}, target={"config": "t"})
    same = [
        {"settings": {"a": {"c": [2], "b": 1}}},
        {"target_path": "/moved"},
        {"versions": {"torch": "9"}},
        {"finished": "now", "seconds": 3.0, "bytes": 4, "samples": 5, "tokens": 6},
    ]
    others = [
        {"stage": "train"},
        {"settings": {"a": {"b": 2, "c": [2]}}},
        {"settings": {"a": {"b": 1, "c": [2], "d": None}}},
        {"inputs": {"extract": "l"}},
        {"inputs": {"generate": "k"}},
        {"target": {"config": "u"}},
    ]
    assert all(origin.model_copy(update=change).key == origin.key for change in same)
    keys = {origin.model_copy(update=change).key for change in others}
    assert len(keys | {origin.key}) == len(others) + 1
    for change in others[1:]:
        assert len(differences(origin, origin.model_copy(update=change))) == (2 if "generate" in str(change) else 1)
    assert differences(origin, origin.model_copy(update=others[1])) == ["settings.a.b: 1 -> 2"]
    none, one = (origin.model_copy(update={"settings": {"env": env}}) for env in ({}, {"A": "x"}))
    assert differences(none, one) == ["settings.env.A: 'absent' -> 'x'"]
    code = f"from ray_eagle.run import Origin; print(Origin(**{origin.model_dump()!r}).key)"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert elsewhere.strip() == origin.key
    assert content_hash({"x": 1.0}) != content_hash({"x": 1.5})


def test_origin_is_kept_in_the_folder_and_damage_is_named(tmp_path: Path) -> None:
    run = RunFolder.open(str(tmp_path))
    assert run.origin("vocab") is None
    origin = Origin(stage="vocab", settings={}, inputs={}, target={})
    run.write_origin(origin)
    assert run.origin("vocab") == origin
    assert run.finished("vocab") is None
    with pytest.raises(OriginError, match=r"/vocab is not finished yet\. Run `ray-eagle vocab` first"):
        run.input_key("vocab")
    with pytest.raises(OriginError, match=r"/drafter was not made yet\. Run `ray-eagle train` first"):
        run.input_key("train")
    keys = set()
    for content in ("one", "other"):  # a redo that gives something else is another input
        run.write_origin(origin.model_copy(update={"finished": "now", "content": content}))
        keys.add(run.input_key("vocab"))
    assert len(keys) == 2
    (tmp_path / "vocab" / "origin.json").write_text("{}")
    with pytest.raises(InputError, match=r"vocab/origin\.json is damaged \(stage: .*--redo"):
        run.origin("vocab")
