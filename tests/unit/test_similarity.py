"""Near-duplicates: hashed n-grams against the plain definition."""

import random
import string

import pytest

from ray_eagle.conversations.similarity import HashIndex, close_to_trained, hashed_shingles, near_any


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(count))


def edited(rng: random.Random, text: str, edits: int) -> str:
    """Replace, drop or double single characters."""
    letters = list(text)
    for _ in range(edits):
        at = rng.randrange(len(letters))
        letters[at] = rng.choice(["", letters[at] * 2, rng.choice(string.ascii_lowercase)])
    return "".join(letters)


def slow_shingles(text: str, n: int = 5) -> set[str]:
    folded = " ".join(text.casefold().split())
    return {folded[i : i + n] for i in range(max(1, len(folded) - n + 1))}


def slow_jaccard(one: str, other: str) -> float:
    a, b = slow_shingles(one), slow_shingles(other)
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("seed", range(10))
def test_similarity_equals_the_plain_definition(seed: int) -> None:
    rng = random.Random(seed)
    texts = [words(rng, rng.randint(1, 12)) for _ in range(5)]
    texts += [edited(rng, text, rng.randint(1, 10)).upper() for text in texts] + [
        "",
        "a",
        "Ab  c",
        "ab C",
        "Straße",
        "STRASSE",
    ]
    for _ in range(16):
        others = rng.sample(texts, 4)
        least = rng.choice([0.1, 0.3, 0.5, 0.9])
        expected = {i for i, text in enumerate(texts) if max(slow_jaccard(text, other) for other in others) >= least}
        assert near_any(HashIndex.of([hashed_shingles(text) for text in texts]), others, least) == expected
    assert near_any(HashIndex.of([]), texts, 0.1) == set()


@pytest.mark.parametrize("seed", range(10))
def test_hashed_similarity_equals_that_of_sets(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["", "a", "ab", "Straße STRASSE", "aaaaa", "aaaaaa"]
    for _ in range(20):
        text = "".join(rng.choices("abc d世🦅", k=rng.randint(1, 60)))
        texts += [text, text[: rng.randint(0, len(text))] + "x" + text[rng.randint(0, len(text)) :]]
    sets = [slow_shingles(text) for text in texts]
    hashed = [hashed_shingles(text) for text in texts]
    assert [len(one) for one in hashed] == [len(one) for one in sets]
    index = HashIndex.of(hashed)
    least = rng.choice([0.2, 0.5, 0.9])
    for one, hashes in zip(sets, hashed, strict=True):
        expected = [i for i, other in enumerate(sets) if len(one & other) / len(one | other) >= least]
        assert index.near(hashes, least) == expected


def test_a_chain_of_near_held_out_texts_is_followed() -> None:
    words = [f"word{i}-{i * 7919 % 1000}" for i in range(40)]
    hashed = [hashed_shingles(" ".join(words[i : i + 20])) for i in range(20)]  # each is near its next two alone
    assert HashIndex.of(hashed).near(hashed[0], 0.8) == [0, 1, 2]
    assert close_to_trained(hashed, {0}, 0.8) == set(range(20))
    assert close_to_trained(hashed, {0}, 0.99) == {0}
    assert close_to_trained(hashed, set(), 0.8) == set()
