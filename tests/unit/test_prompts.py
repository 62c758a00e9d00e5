"""Prompts: the set that ships, the stable split, near-duplicates kept out of the probe, and how a broken line is named."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from ray_eagle.config import GenerateConfig
from ray_eagle.conversations.prompts import (
    Prompt,
    load_prompts,
    prompts_hash,
    read_prompts,
    split_prompts,
)
from ray_eagle.conversations.similarity import HashIndex, hashed_shingles
from ray_eagle.errors import InputError
from tests.unit.test_similarity import edited, slow_jaccard, words

SHARES = {"held_out_share": 0.2, "validation_share": 0.1, "near_duplicate": 0.5}


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def row(name: str = "a", **changes: object) -> str:
    return json.dumps({"id": name, "category": "chat", "turns": [f"Question {name}?"], **changes})


# --- the set that ships ---------------------------------------------------------------------------------------------


def test_shipped_set_is_large_and_balanced() -> None:
    prompts = read_prompts("builtin")
    categories = Counter(p.category for p in prompts)
    assert len(prompts) >= 240
    assert len(categories) == 8
    assert min(categories.values()) >= 30
    assert len({p.id for p in prompts}) == len(prompts)
    assert any(len(p.turns) > 1 for p in prompts)


def test_no_two_shipped_prompts_are_close() -> None:
    prompts = read_prompts("builtin")
    sets = [hashed_shingles(p.text) for p in prompts]
    index = HashIndex.of(sets)
    assert [index.near(one, 0.35) for one in sets] == [[i] for i in range(len(sets))]


def test_every_category_of_the_shipped_set_is_held_out_somewhere() -> None:
    prompts = load_prompts(GenerateConfig(held_out_share=0.13, validation_share=0.05))
    assert {p.category for p in prompts if p.split == "held_out"} == {p.category for p in prompts}
    assert load_prompts(GenerateConfig(limit=7)) == load_prompts(GenerateConfig())[:7]


# --- the split ------------------------------------------------------------------------------------------------------


def test_adding_prompts_moves_none_of_the_others() -> None:
    rng = random.Random(1)
    prompts = [Prompt(f"p{i}", "c", (words(rng, 12),)) for i in range(300)]
    few = {p.id: p.split for p in split_prompts(prompts[:80], **SHARES)}
    shuffled = rng.sample(prompts, len(prompts))
    many = {p.id: p.split for p in split_prompts(shuffled, **SHARES)}
    assert {name: many[name] for name in few} == few
    assert set(few.values()) == {"train", "validation", "held_out"}


def test_shares_are_about_right() -> None:
    rng = random.Random(2)
    prompts = [Prompt(f"{rng.random()}", "c", (f"{i:05d}",)) for i in range(5000)]
    counts = Counter(p.split for p in split_prompts(prompts, **(SHARES | {"near_duplicate": 1.0})))
    assert counts["held_out"] == pytest.approx(1000, abs=120)  # 4 standard deviations
    assert counts["validation"] == pytest.approx(500, abs=90)
    assert counts.total() == 5000


def test_without_shares_everything_is_trained_on() -> None:
    prompts = [Prompt(str(i), "c", (f"{i} x",)) for i in range(50)]
    found = split_prompts(prompts, held_out_share=0, validation_share=0, near_duplicate=0.5)
    assert {p.split for p in found} == {"train"}


@pytest.mark.parametrize("seed", range(20))
def test_near_duplicate_of_a_trained_prompt_is_never_held_out(seed: int) -> None:
    """Families of random edits, also edits of edits: a chain may lead from a training prompt through held-out ones."""
    rng = random.Random(seed)
    prompts = []
    for family in range(6):
        text = words(rng, 14)
        for member in range(8):
            prompts.append(Prompt(f"{seed}-{family}-{member}", "c", (text,)))
            text = edited(rng, text, rng.randint(1, 9))
    shares = {"held_out_share": 0.7, "validation_share": 0.1, "near_duplicate": 0.5}
    found = split_prompts(prompts, **shares)
    trained = [p for p in found if p.split != "held_out"]
    held_out = [p for p in found if p.split == "held_out"]
    assert [(p.id, p.turns) for p in found] == [(p.id, p.turns) for p in prompts]
    for p in held_out:
        assert max(slow_jaccard(p.turns[0], t.turns[0]) for t in trained) < 0.5

    # nothing is moved without need: one that was moved is close to one that is trained on
    alone = {p.id: split_prompts([p], **shares)[0].split for p in prompts}
    for p in found:
        if alone[p.id] == "held_out" and p.split != "held_out":
            assert max(slow_jaccard(p.turns[0], t.turns[0]) for t in trained if t is not p) >= 0.5
        else:
            assert p.split == alone[p.id]


def test_edits_of_one_held_out_prompt_stay_held_out_together() -> None:
    names = [f"x{i}" for i in range(60)]
    held_out = [n for n in names if split_prompts([Prompt(n, "c", ("q",))], **SHARES)[0].split == "held_out"]
    assert len(held_out) > 3
    text = words(random.Random(3), 14)
    found = split_prompts([Prompt(n, "c", (f"{text} {i}",)) for i, n in enumerate(held_out)], **SHARES)
    assert {p.split for p in found} == {"held_out"}


# --- files ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    odd = "line\u2028separator, next\u0085line, form\\ffeed, emoji 🦅"
    raw = '{"id": "b", "turns": ["' + odd + '", "Zweite\\nZeile"]}\r'
    file = write(tmp_path / "p.jsonl", row("a", category="math"), "", "   ", raw)
    assert read_prompts(str(file)) == [
        Prompt("a", "math", ("Question a?",), row=1),
        Prompt("b", "none", (odd.replace("\\f", "\f"), "Zweite\nZeile"), row=4),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"id": "x", "turns": ["a"]', "broken JSON"),
        ("not json", "broken JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ('"text"', "expected a JSON object, found str"),
        ('{"id": "x"}', "turns: expected a list"),
        (row("x", turns=[]), "turns: expected a list that is not empty, found []"),
        (row("x", turns="Hello"), "turns: expected a list that is not empty, found 'Hello'"),
        (row("x", turns=["a", 3]), "turn 2: expected text, found 3"),
        (row("x", turns=["a", " \n"]), "turn 2: expected text"),
        (row("l2"), "same id as row 2"),
        (b'{"id": "x", "turns": ["caf\xe9"]}', "UTF-8"),
    ],
)
def test_broken_line_is_named_with_its_number(tmp_path: Path, line: str | bytes, reason: str) -> None:
    file = write(tmp_path / "p.jsonl", "", *(row(f"l{n}") for n in range(2, 6)), line, row("z"))
    with pytest.raises(InputError) as caught:
        read_prompts(str(file))
    message = str(caught.value)
    assert message.startswith(f"prompts file {file}, row 6: ")
    assert reason in message


def test_prompts_of_a_probe_may_have_any_shape(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    file = write(
        tmp_path / "p.jsonl", json.dumps({"id": "m", "messages": [*talk, {"role": "assistant", "content": "x"}]})
    )
    assert read_prompts(str(file)) == [Prompt("m", "none", ("Why?",), system="Be brief.", row=1)]


def test_empty_and_missing_files_are_named(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl", "", " ")
    with pytest.raises(InputError, match=r"empty\.jsonl: expected "):
        read_prompts(str(empty))
    for path in (tmp_path / "missing.jsonl", tmp_path):
        for read in (load_prompts, prompts_hash):
            with pytest.raises(InputError) as caught:
                read(GenerateConfig(prompts=str(path)))
            assert str(caught.value).startswith(f"prompts file {path} cannot be read (")


def test_the_hash_of_the_prompts_is_of_their_content(tmp_path: Path) -> None:
    one, other = write(tmp_path / "1.jsonl", row("a")), write(tmp_path / "2.jsonl", row("a"))
    assert prompts_hash(GenerateConfig(prompts=str(one))) == prompts_hash(GenerateConfig(prompts=str(other)))
    write(other, row("b"))
    assert prompts_hash(GenerateConfig(prompts=str(one))) != prompts_hash(GenerateConfig(prompts=str(other)))
