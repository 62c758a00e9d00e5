"""Inputs: every shape and file format gives the same messages, every row is kept or rejected with a reason, nothing is lost."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_eagle.config import GenerateConfig, TargetConfig
from ray_eagle.conversations import inputs
from ray_eagle.conversations.inputs import Chunk, count_rows, read_chunks, shape_of, source_hash
from ray_eagle.conversations.keep import tokenise_chunk
from ray_eagle.conversations.messages import Message, RowError, content_id, read_row, take_apart
from ray_eagle.conversations.prompts import load_prompts, load_rows
from ray_eagle.errors import InputError
from ray_eagle.settings import absolute_paths, load_config
from ray_eagle.target.loading import read_facts

MARKS = ("<think>\n", "\n</think>\n\n")
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi\u2028there, 世界 🦅"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 42."},
]


def read(raw: Any, shape: Any = "messages") -> list[Message]:
    return read_row(raw, shape, MARKS).messages


def everything(source: str | Path, limit: int | None = None) -> list[tuple[int, Any]]:
    return [pair for chunk in read_chunks(str(source), limit) for pair in chunk.rows()]


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_openai_messages_are_read_with_parts_tools_and_reasoning() -> None:
    as_text = {**CALL, "function": {"name": "f", "arguments": '{"x": 1}'}}
    raw = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": TALK[1]["content"], "name": None},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [as_text], "refusal": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is 42.", "reasoning_content": None},
    ]
    assert read({"messages": raw}) == TALK
    assert read({"messages": json.dumps(raw)}) == TALK
    row = read_row({"messages": raw, "tools": [{"name": "f"}], "id": 7, "category": "math"}, "messages", MARKS)
    assert (row.id, row.category) == ("7", "math")
    assert row.tools == [{"type": "function", "function": {"name": "f"}}]


def test_sharegpt_is_read() -> None:
    raw = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": TALK[1]["content"]},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "<think>\nhm\n</think>\n\nIt is 42."},
        ],
    }
    call = {key: value for key, value in CALL.items() if key != "id"}
    assert read(raw, "sharegpt") == [
        *TALK[:2],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42.", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize(
    ("raw", "shape", "expected"),
    [
        ({"prompt": "a"}, "prompt", ["user:a"]),
        ({"instruction": "a", "input": "", "output": "b"}, "prompt", ["user:a", "assistant:b"]),
        ({"instruction": "a", "input": "c", "output": "b"}, "prompt", ["user:a\n\nc", "assistant:b"]),
        ({"question": "a", "answer": "b", "system": "s"}, "prompt", ["system:s", "user:a", "assistant:b"]),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
            "prompt",
            ["user:a", "assistant:b"],
        ),
        ({"turns": ["a", "b"]}, "turns", ["user:a", "user:b"]),
        ({"text": "a"}, "text", ["user:a"]),
        ("a", "text", ["user:a"]),
        ({"conversations": [{"role": "user", "content": "a"}]}, "sharegpt", ["user:a"]),
    ],
)
def test_prompts_of_every_shape(raw: Any, shape: str, expected: list[str]) -> None:
    assert inputs.detect_shape([{}, 3, raw], "x") == shape
    assert [f"{m['role']}:{m['content']}" for m in read(raw, shape)] == expected


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.jsonl", b"", "expected rows, found none: it is empty"),
        ("a.txt", b"\n \n", "expected rows, found none: it is empty"),
        ("a.json", b"[]", "expected rows, found none: it is empty"),
        ("a.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "expected UTF-8, found the mark of UTF-16 at its start"),
        ("a.txt", b"\xfe\xff" + "a\n".encode("utf-16-be"), "expected UTF-8, found the mark of UTF-16 at its start"),
        (
            "a.jsonl",
            '{"prompt": "Größe"}\n'.encode("latin-1"),
            "found none that can be decoded: expected UTF-8, found other",
        ),
        ("a.jsonl", b"hello\n", "found none that can be decoded: broken JSON"),
    ],
)
def test_a_file_without_rows_is_named_with_the_reason(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        shape_of(str(tmp_path / name), "auto")
    assert str(tmp_path / name) in str(caught.value)
    assert reason in str(caught.value)
    if "decoded" not in reason:
        with pytest.raises(InputError, match=reason):
            count_rows(str(tmp_path / name))


@pytest.mark.parametrize(
    ("raw", "shape", "reason"),
    [
        (3, "messages", "expected a JSON object, found int"),
        ({}, "messages", "messages: expected a list that is not empty, found None"),
        ({"messages": []}, "messages", "messages: expected a list that is not empty, found []"),
        ({"messages": "oops"}, "messages", "messages: expected a list that is not empty, found 'oops'"),
        ({"messages": ["a"]}, "messages", "expected a message with a role, found str"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "messages", "unknown role 'narrator'"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "no message of a user"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "the first message is of the assistant"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "the user's messages are empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "content: expected text or parts, found int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "content part of type 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
            "messages",
            "an answer of the assistant is empty",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"x": 1}]}]},
            "messages",
            "a tool call without a function's name",
        ),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages", "half a character"),
        ({"turns": ["a", " "]}, "turns", "turn 2: expected text"),
        ({"output": "b"}, "prompt", "expected one of prompt, instruction, question, query, found none"),
        ({"prompt": 3}, "prompt", "prompt: expected text, found int"),
        ({"prompt": "a", "tools": [3]}, "prompt", "tools: expected JSON objects"),
    ],
)
def test_a_row_that_cannot_be_read_says_why(raw: Any, shape: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        read_row(raw, shape, MARKS)
    assert str(caught.value).startswith(reason) or reason in str(caught.value)


def test_an_id_is_the_rows_own_or_the_hash_of_its_content() -> None:
    one, same, other = ({"text": "a", **more} for more in ({}, {"category": "c"}, {"text": "b"}))
    ids = [read_row(raw, "text", MARKS).id for raw in (one, same, other)]
    assert ids[0] == ids[1] != ids[2] and all(len(name) == 16 for name in ids)
    assert ids[0] == content_id([{"role": "user", "content": "a"}], [])
    for key in ("id", "conversation_id", "uuid"):
        assert read_row({"text": "a", key: "mine"}, "text", MARKS).id == "mine"


def test_reasoning_is_taken_apart_only_where_a_text_begins_with_it() -> None:
    assert take_apart("<think>\na\n\nb\n</think>\n\nc", MARKS) == ("a\n\nb", "c")
    assert take_apart("  <think>a</think>c", MARKS) == ("a", "c")
    for text in ("say <think>a</think>", "<think>a", "a</think>b", ""):
        assert take_apart(text, MARKS) == ("", text)


def test_what_no_shape_fits_names_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1, "b": 2}\n')
    with pytest.raises(InputError, match=r"found \['a', 'b'\]\. Rename a column, or set generate\.shape"):
        shape_of(str(file), "auto")
    assert shape_of(str(file), "turns") == "turns"


# --- files ----------------------------------------------------------------------------------------------------------


def write_all(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """The same rows in every format."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (folder / "b.json").write_text(json.dumps(rows))
    (folder / "c.json").write_text(json.dumps({"version": 1, "data": rows}))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "e.parquet", row_group_size=7)
    with pa.OSFile(str(folder / "f.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    with pa.OSFile(str(folder / "g.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (folder / "h").write_bytes(lines)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("count", [1, 37, 1203])
def test_every_format_gives_the_same_rows_in_chunks(tmp_path: Path, count: int) -> None:
    rows = [
        {
            "id": str(i),
            "messages": [{"role": "user", "content": f"Frage {i} \u2028\n🦅"}, {"role": "assistant", "content": "a"}],
        }
        for i in range(count)
    ]
    for file in write_all(tmp_path, rows):
        assert everything(file) == list(enumerate(rows, 1)), file.name
        assert everything(file, 9) == list(enumerate(rows[:9], 1)), file.name
        chunks = list(read_chunks(str(file)))
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert max(len(chunk.numbers) for chunk in chunks) <= inputs.CHUNK_ROWS
        assert count_rows(str(file)) == count and count_rows(str(file), 9) == min(count, 9)
        assert shape_of(str(file), "auto") == "messages"
        assert len(source_hash(str(file))) == 16


def test_lines_keep_their_numbers_and_broken_ones_their_reason(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"text": "a"}\n\n  \n{"text"\n"caf\xe9"\n{"text": "b"}')
    rows = everything(file)
    assert [number for number, _ in rows] == [1, 4, 5, 6]
    assert "broken JSON" in str(rows[1][1]) and "expected UTF-8" in str(rows[2][1])
    text = tmp_path / "x.txt"
    text.write_bytes(b'Hallo Welt\r\n\n {"no": "JSON"}\n')
    assert everything(text) == [(1, "Hallo Welt"), (3, ' {"no": "JSON"}')]


def test_chunks_end_by_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    lines = [json.dumps({"text": "x" * rng.randint(0, 300)}) for _ in range(500)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(inputs, "READ_BYTES", 77)
    chunks: list[Chunk] = list(read_chunks(str(tmp_path / "x.jsonl")))
    assert [line.decode() for chunk in chunks for line in chunk.lines or ()] == lines
    for chunk in chunks[:-1]:
        sizes = [len(line) for line in chunk.lines or ()]
        assert sum(sizes) >= 1000 > sum(sizes[:-1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"a,b", r"expected \.jsonl, \.json, \.parquet, \.arrow or \.txt, found \.csv"),
        ("x.json", b'[{"text": "a"}, {"te', r"x\.json: expected JSON, found Unterminated string"),
        ("x.json", b"3", r"x\.json: expected a list of rows, found int"),
        ("x.parquet", b"PAR1 not really", "is damaged"),
        ("x.arrow", b"ARROW1 not really", "is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_chunks(str(tmp_path / name)))


def test_a_hub_dataset_needs_its_package_and_is_never_taken_for_a_path() -> None:
    config = absolute_paths(load_config(flags=["--generate.prompts", "hub:some/set:test"]).config)
    assert config.generate.prompts == "hub://some/set:test"
    assert source_hash(config.generate.prompts) != source_hash("hub://some/set")
    with pytest.raises(
        InputError, match=r"need the package datasets, which is not installed. pip install 'ray-eagle\[datasets\]'"
    ):
        list(read_chunks(config.generate.prompts))


# --- every row is accounted for -------------------------------------------------------------------------------------


def messy(rng: random.Random, number: int) -> str:
    """A line that may be anything."""
    user, answer = (
        {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": f"answer {number}"},
    )
    good = [user, answer] * rng.randint(1, 3)
    kinds: list[Any] = [
        {"messages": good},
        {"messages": good, "id": rng.choice(["same", f"own{number}"])},
        {"messages": [*good, user]},
        {"messages": [user]},
        {"messages": [answer]},
        {"messages": None},
        {"conversations": good},
        {"messages": [user, {"role": "assistant", "content": "a<|end|>b"}]},
        {"messages": [user, {"role": "assistant", "content": "long " * 200}]},
        {
            "messages": [
                user,
                {"role": "assistant", "content": rng.choice(["", " ", None, 3, ["x"], [{"type": "image"}]])},
            ]
        },
        {"messages": [{"role": rng.choice(["user", "x", None, 4]), "content": "hi"}, answer]},
        {"messages": [user, {**answer, "content": "\ud800"}]},
        [1, 2],
        None,
    ]
    text = json.dumps(rng.choice(kinds[:3] if rng.random() < 0.4 else kinds))
    return text[: rng.randint(0, len(text))] if rng.random() < 0.1 else text


@pytest.mark.parametrize("seed", range(8))
def test_of_messy_input_each_row_is_kept_or_rejected_with_a_reason(
    seed: int, tmp_path: Path, target_folder: Path
) -> None:
    rng = random.Random(seed)
    lines = ['{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}']
    lines += [messy(rng, i) for i in range(700)]
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(lines))
    rows = [number for number, line in enumerate(lines, 1) if line.strip()]
    target = TargetConfig(path=str(target_folder))
    facts = read_facts(target)
    settings = GenerateConfig(prompts=str(file), answers="keep", turns=rng.choice(["all", "last", "split"]))
    kept, rejected = [], []
    for chunk in read_chunks(str(file)):
        _, _, some, others = tokenise_chunk(chunk, {}, frozenset(), "messages", target, facts, settings)
        kept += some
        rejected += others
    assert sorted([row["row"] for row in kept] + [row["row"] for row in rejected]) == rows
    assert all(row["reason"] for row in rejected) and len(kept) > 100 and len(rejected) > 100
    assert all(row["supervised"] and len(row["input_ids"]) <= facts.max_position_embeddings for row in kept)

    prompts, unusable = load_rows(settings)  # what the probe sees of the same file
    assert len(prompts) + len(unusable) == len(rows)
    assert {row["source_id"] for row in kept} <= {p.id for p in prompts}
    assert max(Counter(p.id for p in prompts).values()) == 1


def test_prompts_to_answer_keep_the_system_message_and_leave_tools_out(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    rows = [
        {"id": "plain", "messages": [TALK[0], TALK[1]]},
        {"id": "tools", "messages": TALK},
        {"id": "plain", "messages": TALK[:2]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, rejected = load_rows(GenerateConfig(prompts=str(file)))
    assert [(p.id, p.system, p.turns) for p in prompts] == [("plain", "Be brief.", (TALK[1]["content"],))]
    assert [r["row"] for r in rejected] == [2, 3]
    assert (
        "tools, whose results cannot be made again" in rejected[0]["reason"]
        and "same id as row 1" in rejected[1]["reason"]
    )


def test_a_file_without_a_usable_row_is_refused_with_the_first_reasons(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"turns": []}\n{"turns": [" "]}\n')
    with pytest.raises(
        InputError, match=r"found none \(row 1: turns: expected a list .*; row 2: turn 1: expected text"
    ):
        load_prompts(GenerateConfig(prompts=str(file)))


def test_a_rejected_row_keeps_its_own_id(tmp_path: Path, target_folder: Path) -> None:
    file = tmp_path / "x.jsonl"
    bad = [
        {"id": "a2", "messages": []},
        {"uuid": 7, "messages": []},
        {"id": "\ud800", "messages": []},
        {"messages": []},
        3,
    ]
    good = {"id": "a2", "messages": TALK[1:3]}
    file.write_text("".join(json.dumps(row) + "\n" for row in [*bad, good]))
    settings = GenerateConfig(prompts=str(file), answers="keep", shape="messages")
    expected = ["a2", "7", "?", "", ""]
    assert [row["source_id"] for row in load_rows(settings)[1]][:5] == expected
    target = TargetConfig(path=str(target_folder))
    (chunk,) = read_chunks(str(file))
    rejected = tokenise_chunk(chunk, {}, frozenset(), "messages", target, read_facts(target), settings)[3]
    assert [row["source_id"] for row in rejected][:5] == expected
