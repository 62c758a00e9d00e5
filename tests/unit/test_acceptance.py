"""Acceptance statistics, repeats and the walk, against loops that follow the definitions word by word."""

import numpy as np
import pytest

from ray_eagle.errors import InputError
from ray_eagle.probing.acceptance import acceptance, bootstrap_ratio
from ray_eagle.probing.repeats import passes_without_repeats, repeated_ngram_share, repeated_positions
from ray_eagle.probing.walk import answers_of, walk_answer


def random_counts(rng: np.random.Generator, prompts: int, steps: int) -> list[list[int]]:
    return [rng.integers(0, steps + 1, size=int(rng.integers(0, 9))).tolist() for _ in range(prompts)]


@pytest.mark.parametrize("seed", range(8))
def test_statistics_equal_the_definitions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(1, 6))
    accepted = random_counts(rng, 20, steps)
    categories = [("chat", "math", "code")[int(i)] for i in rng.integers(0, 3, size=20)]
    result = acceptance(accepted, categories, steps=steps, resamples=50)

    passes = [j for counts in accepted for j in counts]
    assert result.histogram == [sum(j == i for j in passes) for i in range(steps + 1)]
    assert result.verify_passes == len(passes)
    assert result.prompts == sum(bool(counts) for counts in accepted)
    previous = 1.0
    for i in range(1, steps + 1):
        p = sum(j >= i for j in passes) / len(passes)
        assert result.marginal[i - 1] == pytest.approx(p)
        assert result.conditional[i - 1] == pytest.approx(p / previous)
        previous = p
    assert result.acceptance_length == pytest.approx(1 + sum(passes) / len(passes))
    for name in set(categories):
        chosen = [j for counts, category in zip(accepted, categories, strict=True) if category == name for j in counts]
        assert result.by_category[name].acceptance_length == pytest.approx(1 + sum(chosen) / len(chosen))
        assert result.by_category[name].verify_passes == len(chosen)


def test_a_table_by_hand() -> None:
    result = acceptance([[0, 3, 1], [2], []], ["a", "b", "b"], steps=3)
    assert result.histogram == [1, 1, 1, 1]
    assert result.marginal == [0.75, 0.5, 0.25]
    assert result.conditional == pytest.approx([0.75, 2 / 3, 0.5])
    assert result.acceptance_length == 2.5
    assert (result.verify_passes, result.prompts) == (4, 2)
    assert result.by_category["b"].acceptance_length == 3.0
    assert result.by_category["b"].prompts == 1


def test_conditional_is_unknown_where_no_pass_got_that_far() -> None:
    result = acceptance([[0, 1], [1]], ["a", "a"], steps=3)
    assert result.conditional == [pytest.approx(2 / 3), 0.0, None]


def test_prompts_are_pooled_not_averaged() -> None:
    """One long answer weighs by its passes: the mean of per-prompt means would say 2.5."""
    assert acceptance([[0] * 9, [3]], ["a", "a"], steps=3).acceptance_length == pytest.approx(1.3)


def test_the_interval_is_the_bootstrap_of_the_pooled_ratio() -> None:
    """Against a loop that draws prompts one by one with another generator: equal up to the noise of resampling."""
    rng = np.random.default_rng(3)
    accepted = [rng.binomial(3, rng.uniform(0.1, 0.9), size=int(rng.integers(2, 20))).tolist() for _ in range(30)]
    result = acceptance(accepted, ["a"] * 30, steps=3, confidence=0.9, resamples=4000, seed=1)
    values = []
    for _ in range(4000):
        drawn = [accepted[int(i)] for i in rng.integers(0, 30, size=30)]
        values.append(1 + sum(sum(counts) for counts in drawn) / sum(len(counts) for counts in drawn))
    assert result.interval == pytest.approx(tuple(np.quantile(values, [0.05, 0.95])), abs=0.02)
    assert result.interval[0] < result.acceptance_length < result.interval[1]
    assert result == acceptance(accepted, ["a"] * 30, steps=3, confidence=0.9, resamples=4000, seed=1)
    other_seed = acceptance(accepted, ["a"] * 30, steps=3, confidence=0.9, resamples=4000, seed=2)
    assert other_seed.interval != result.interval


def test_the_interval_of_one_prompt_is_its_value() -> None:
    assert acceptance([[1, 2]], ["a"], steps=2).interval == (2.5, 2.5)


def test_the_interval_narrows_with_more_prompts_and_less_confidence() -> None:
    rng = np.random.default_rng(0)

    def width(prompts: int, confidence: float) -> float:
        numbers = rng.normal(10, 2, size=prompts)
        low, high = bootstrap_ratio(numbers, np.ones(prompts), confidence=confidence, resamples=1000, seed=0)
        return high - low

    assert width(400, 0.95) < width(20, 0.95) / 2
    assert width(50, 0.6) < width(50, 0.99)


@pytest.mark.parametrize("accepted", [[], [[]], [[], [], []]])
def test_no_passes_is_an_error_that_says_what_to_change(accepted: list[list[int]]) -> None:
    with pytest.raises(InputError, match="max_new_tokens"):
        acceptance(accepted, ["a"] * len(accepted), steps=3)


@pytest.mark.parametrize("count", [-1, 4])
def test_counts_of_another_number_of_steps_are_refused(count: int) -> None:
    with pytest.raises(InputError, match="expected 0 to 3"):
        acceptance([[0, count]], ["a"], steps=3)


def test_missing_categories_are_refused() -> None:
    with pytest.raises(InputError, match="category"):
        acceptance([[0], [1]], ["a"], steps=3)


@pytest.mark.parametrize("seed", range(10))
def test_repeats_equal_a_search_through_the_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    answers = [rng.integers(0, 3, size=int(rng.integers(0, 30))).tolist() for _ in range(6)]
    repeated = total = 0
    for tokens in answers:
        for end in range(len(tokens)):
            grams = [tokens[i : i + n] for i in range(end - n + 1)]  # all that begin before the one ending here
            expected = end >= n - 1 and tokens[end - n + 1 : end + 1] in grams
            assert repeated_positions(tokens, n)[end] == expected
            repeated += expected
            total += end >= n - 1
    assert repeated_ngram_share(answers, n) == pytest.approx(repeated / total)


def test_a_loop_counts_as_repeated_from_its_second_round() -> None:
    tokens = [*range(10), *range(10), 99]
    assert np.flatnonzero(repeated_positions(tokens)).tolist() == [17, 18, 19]
    assert repeated_ngram_share([tokens]) == pytest.approx(3 / 14)
    assert repeated_ngram_share([[1, 2, 3], []]) == 0.0
    assert repeated_ngram_share([tokens, list(range(100, 120))]) == pytest.approx(3 / 27)


def test_the_same_text_in_two_answers_is_no_repeat() -> None:
    assert repeated_ngram_share([list(range(9)), list(range(9))]) == 0.0


def test_passes_that_draft_from_inside_a_loop_are_dropped() -> None:
    tokens = [*range(10), *range(10), 99]  # positions 17, 18 and 19 of the answer end a repeated 8-gram
    prompt_length = 5
    starts = [4, 15 + 5, 16 + 5 - 1, 17 + 5, 18 + 5]
    first_drafted = [start + 2 - prompt_length for start in starts]
    assert first_drafted == [1, 17, 17, 19, 20]
    assert passes_without_repeats(tokens, prompt_length, starts, [0, 1, 2, 3, 0]) == [0, 0]


def slow_walk(right: list[list[bool]], first: int, last: int) -> list[tuple[int, int]]:
    """Serve the answer token by token: each drafted token is looked up, one at a time."""
    steps, passes = len(right), []
    committed = first  # index of the newest token; the prefill gave x[first]
    while True:
        t = committed - 1
        chain = [committed + 1 + k for k in range(steps)]  # indices of the tokens that this pass guesses
        if chain[-1] > last:
            return passes
        accepted = 0
        for k in range(steps):
            if not right[k][t]:
                break
            accepted += 1
        passes.append((t, accepted))
        committed += accepted + 1


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_equals_serving_token_by_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, length = int(rng.integers(1, 6)), int(rng.integers(2, 60))
    right_KT = rng.random((steps, length)) < rng.uniform(0.2, 0.95)
    for _ in range(10):
        first = int(rng.integers(1, length))
        last = int(rng.integers(first, length))
        assert walk_answer(right_KT, first, last) == slow_walk(right_KT.tolist(), first, last)


def test_a_walk_by_hand() -> None:
    right_KT = np.zeros((2, 12), dtype=bool)
    right_KT[:, 3] = True  # both right at t = 3
    right_KT[1, 6] = True  # right after a wrong one: worth nothing
    right_KT[0, 7] = True
    # t = 9 would draft x[11] and x[12], beyond the answer x[4..11]
    assert walk_answer(right_KT, 4, 11) == [(3, 2), (6, 0), (7, 1)]
    assert walk_answer(right_KT, 4, 12) == [(3, 2), (6, 0), (7, 1), (9, 0)]
    assert walk_answer(right_KT, 4, 5) == []


def test_an_answer_at_the_very_beginning_cannot_be_walked() -> None:
    with pytest.raises(InputError, match="at least 1"):
        walk_answer(np.ones((2, 5), dtype=bool), 0, 4)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([1], [(0, 0)]),
        ([0, 1, 1, 0, 1], [(1, 2), (4, 4)]),
        ([1, 1, 0, 0, 1, 0], [(0, 1), (4, 4)]),
    ],
)
def test_answers_are_the_runs_of_supervised_tokens(mask: list[int], expected: list[tuple[int, int]]) -> None:
    assert answers_of(mask) == expected
    assert answers_of(np.array(mask, dtype=np.uint8)) == expected
    assert answers_of(np.array(mask, dtype=bool)) == expected
