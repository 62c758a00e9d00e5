"""Sweeps over scripted servers: phases and turns, what is refused, what the report says."""

import contextlib
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from ray_eagle.errors import InputError, ServingError
from ray_eagle.probing.reports import (
    ProbePrompt,
)
from ray_eagle.probing.sweep import breakeven_with, needed_sentence, probe_with, run_breakeven_sweep, run_sweep
from ray_eagle.serving.engine import EngineFacts, Speculation
from ray_eagle.serving.generation import VerifyPass
from ray_eagle.serving.messages import GenerateReply

PROMPTS = [ProbePrompt(id=f"p{i}", category="ab"[i % 2], input_ids=[i] * (1 + 60 * i)) for i in range(10)]
PLAIN_S = {1: 0.010, 4: 0.016}


def reply(prompt: list[int], tokens: list[int], passes: list[VerifyPass], step: float) -> GenerateReply:
    made = len(tokens) - 1
    return GenerateReply(
        text="",
        tokens=tokens,
        prompt_length=len(prompt),
        passes=passes,
        finish_reason="length",
        prefill_seconds=1.0,
        decode_seconds=9.0,
        decode_tokens=made,
        step_seconds=step,
    )


class Scripted:
    """Every pass accepts `right` drafts; a cycle takes 4 ms a step longer than a plain step, which depends on the batch."""

    def __init__(self, right: int = 2, *, random_text: bool = False) -> None:
        self.right, self.random_text = right, random_text
        self.now: Speculation | None = Speculation(steps=3)
        self.calls: list[Any] = []

    def configure(self, speculation: Speculation | None) -> EngineFacts:
        self.calls.append(speculation)
        self.now = speculation
        return self.engine()

    def engine(self) -> EngineFacts:
        flags = [] if self.now is None else ["--steps", str(self.now.steps)]
        return EngineFacts(
            name="scripted", version="1", server=str(self.now), speculation=self.now, max_concurrency=4, flags=flags
        )

    def decode(self, *, prompts: list[list[int]], max_new_tokens: int, concurrency: int, **rest: Any) -> list[Any]:
        self.calls.append((len(prompts), max_new_tokens, concurrency, rest.get("gaps", False)))
        step, made = PLAIN_S[concurrency], []
        for prompt in prompts:
            tokens = list(range(max_new_tokens))
            passes: list[VerifyPass] = []
            if self.now:
                step = PLAIN_S[concurrency] + 0.004 * self.now.steps
                right = min(self.right, self.now.steps)
                for start in range(len(prompt) - 1, len(prompt) + max_new_tokens - 2, right + 1):
                    passes.append(VerifyPass(start, [], right, 0))
            made.append(reply(prompt, tokens, passes, step))
        return made

    def generate(self, **request: Any) -> GenerateReply:
        raise AssertionError("a sweep decodes in batches")


def sweep(client: Any, **options: Any) -> Any:
    settings = options.pop("settings", [Speculation(steps=3), Speculation(steps=1)])
    concurrencies = options.pop("concurrencies", [1, 4])
    return run_sweep(
        client,
        PROMPTS,
        settings=settings,
        concurrencies=concurrencies,
        max_new_tokens=40,
        plain_prompts=3,
        resamples=50,
        **options,
    )


def test_each_setting_is_one_start_and_the_baseline_comes_last() -> None:
    client = Scripted()
    sweep(client)
    starts = [call for call in client.calls if not isinstance(call, tuple)]
    assert starts == [Speculation(steps=3), Speculation(steps=1), None]
    first = client.calls[1 : client.calls.index(Speculation(steps=1))]
    # a warm-up, then all prompts one by one; at 4 at once two whole batches of those that are decoded both ways
    assert first == [(1, 8, 1, False), *[(1, 40, 1, False)] * 10, (4, 8, 4, False), *[(4, 40, 4, False)] * 2]
    plain = client.calls[client.calls.index(None) + 1 :]
    assert plain == [(1, 8, 1, False), *[(1, 40, 1, False)] * 3, (4, 8, 4, False), *[(4, 40, 4, False)] * 2]


class BothReady(Scripted):
    """Holds plain and speculative decoding ready, on a machine that takes `drift` longer with each call, in all `slower`."""

    def __init__(self, drift: float = 0.0, *, side_by_side: bool = True) -> None:
        super().__init__()
        self.drift, self.side_by_side, self.slower = drift, side_by_side, 1.0

    def engine(self) -> EngineFacts:
        return super().engine().model_copy(update={"side_by_side": self.side_by_side})

    def decode(self, **request: Any) -> list[Any]:
        self.slower *= 1 + self.drift
        made = super().decode(**request)
        return [m.model_copy(update={"step_seconds": m.step_seconds * self.slower}) for m in made]


def test_where_both_are_ready_they_take_turns() -> None:
    client = BothReady()
    report = sweep(client, concurrencies=[4, 1], settings=[Speculation(steps=3)])
    turns = [("plain" if call is None else "drafts") if not isinstance(call, tuple) else call for call in client.calls]
    fours = [(4, 8, 4, False), (4, 40, 4, False), (4, 40, 4, False)]
    ones = [(1, 8, 1, False), *[(1, 40, 1, False)] * 3]
    # at 4 at once: two whole batches both ways, then the two prompts that are left; at 1 at once three prompts both ways
    rest = [(4, 8, 4, False), (2, 40, 4, False)]
    assert turns == [
        *("drafts", "plain"),
        *("drafts", *fours, "plain", *fours, "drafts", *rest),
        *("drafts", *ones, "plain", *ones, "drafts"),
        "plain",
    ]
    assert report.acceptance.prompts == 10 and not any("one after the other" in note for note in report.notes)


@pytest.mark.parametrize("drift", [0.0, 0.002, -0.002])
def test_a_drift_of_the_machine_tilts_only_what_is_timed_apart(drift: float) -> None:
    prompts = [ProbePrompt(id=f"p{i}", category="a", input_ids=[i + 1]) for i in range(64)]
    options = {"settings": [Speculation(steps=3)], "concurrencies": [1, 4], "max_new_tokens": 20}
    for side_by_side in (True, False):
        report = run_breakeven_sweep(BothReady(drift, side_by_side=side_by_side), prompts, **options)
        tilt = [row.needed / true for row, true in zip(report.rows, (2.2, 1.75), strict=True)]
        most = 0.03 if side_by_side or not drift else 1.0
        assert [abs(t - 1) < most for t in tilt] == [True, True], tilt
        assert side_by_side or not drift or abs(tilt[0] - 1) > 0.1
        assert any("one after the other" in note for note in report.notes) != side_by_side


def test_the_best_setting_at_the_first_concurrency_is_reported() -> None:
    report = sweep(Scripted(right=2))
    by_name = {(row.steps, row.concurrency): row for row in report.sweep}
    assert {key: row.break_even for key, row in by_name.items()} == pytest.approx(
        {(3, 1): 2.2, (3, 4): 1.75, (1, 1): 1.4, (1, 4): 1.25}
    )
    assert by_name[3, 1].acceptance_length == 3.0 and by_name[1, 1].acceptance_length == 2.0
    assert {key for key, row in by_name.items() if row.best} == {(1, 1), (3, 4)}
    assert (report.steps, report.concurrency, report.break_even) == (1, 1, pytest.approx(1.4))
    assert report.verdict == "serve" and "--steps 1" in " ".join(report.reasons)
    assert report.acceptance.prompts == 10 and report.speed.prompts == 3
    assert by_name[3, 4].plain_tokens_per_second == pytest.approx(4 / 0.016)
    assert by_name[3, 4].speculative_tokens_per_second == pytest.approx(4 * 3 / 0.028)
    assert "concurrency 4 the best of these settings is 3 steps" in " ".join(report.notes)
    assert "mixture-of-experts" in report.notes[0] and f"{report.mean_context:.0f} tokens" in report.notes[0]
    assert report.by_prompt_length.keys() == {"< 128", "128-511", "512-2047"}


def test_break_even_rows_and_the_sentence() -> None:
    report = run_breakeven_sweep(
        Scripted(right=0), PROMPTS, settings=[Speculation(steps=3)], concurrencies=[1, 4], max_new_tokens=20
    )
    assert (
        needed_sentence(report, 3) == "with 3 draft steps, at concurrency 1 you need 2.20 accepted, at 4 you need 1.75"
    )
    assert [row.can_pay for row in report.rows] == [True, True]


def test_what_can_not_be_measured_is_said_before() -> None:
    with pytest.raises(InputError, match="at least 16 prompts"):
        sweep(Scripted(), concurrencies=[16])
    with pytest.raises(InputError, match="at least one prompt"):
        run_sweep(Scripted(), [], settings=[], concurrencies=[1], max_new_tokens=8, plain_prompts=1)
    with pytest.raises(InputError, match=r"breakeven\.steps"):
        run_breakeven_sweep(Scripted(), PROMPTS, settings=[], concurrencies=[1], max_new_tokens=8)


class Failing(Scripted):
    """The third batch is the last: of a client that left, or a server that gave up."""

    def decode(self, **request: Any) -> Any:
        if sum(isinstance(call, tuple) for call in self.calls) == 2:
            raise KeyError("left")
        return super().decode(**request)


@pytest.mark.parametrize("client", [Scripted(), Failing()])
@pytest.mark.parametrize("before", [None, Speculation(steps=2)])
def test_a_server_that_outlives_the_probe_drafts_as_before(client: Scripted, before: Speculation | None) -> None:
    client.now = before
    with contextlib.suppress(KeyError):
        probe_with(
            client,
            PROMPTS,
            engine="sglang",
            settings=[Speculation(steps=3)],
            concurrencies=[1],
            temperature=0.0,
            outlived=True,
            max_new_tokens=8,
            plain_prompts=2,
        )
    assert client.now == before


class Counting(Scripted):
    """Counts its requests; `foreign` more come in with the fifth, and `running` are inside from the start."""

    def __init__(self, foreign: int = 0, running: int = 0) -> None:
        super().__init__()
        self.foreign, self.running, self.requests = foreign, running, 40

    def engine(self) -> EngineFacts:
        return super().engine().model_copy(update={"requests": self.requests, "running": self.running})

    def decode(self, **request: Any) -> Any:
        self.requests += 1 + (self.foreign if self.requests == 44 else 0)
        return super().decode(**request)


def test_requests_of_others_falsify_a_measurement() -> None:
    assert sweep(Counting()).verdict == "serve"
    for client in (Counting(foreign=1), Counting(running=1)):
        with pytest.raises(ServingError, match="only this measurement uses"):
            sweep(client)


class Untimed(Scripted):
    """Plain batches with the first prompt in them were never full; speculative cycles of it take ten times as long."""

    def decode(self, *, prompts: list[list[int]], **rest: Any) -> Any:
        made = super().decode(prompts=prompts, **rest)
        if PROMPTS[0].input_ids not in prompts:
            return made
        factor = 10 if self.now else 0
        return [r.model_copy(update={"step_seconds": factor * r.step_seconds}) for r in made]


def test_only_prompts_timed_both_ways_count_and_the_others_are_told() -> None:
    report = sweep(Untimed())
    clean = {(row.steps, row.concurrency): row for row in sweep(Scripted()).sweep}
    for row in report.sweep:
        assert row.break_even == pytest.approx(clean[row.steps, row.concurrency].break_even)
        assert row.prompts_timed == {1: 2, 4: 4}[row.concurrency]
    [row] = [row for row in report.sweep if (row.steps, row.concurrency) == (report.steps, 1)]
    assert report.break_even == row.break_even and report.speed.prompts == row.prompts_timed == 2
    assert report.speed.break_even_interval == row.break_even_interval
    assert report.speedup_interval == row.speedup_interval
    assert any("At concurrency 4, 1 of 6 batches were not timed" in note for note in report.notes)
    assert not any("not timed" in note for note in sweep(Scripted()).notes)
    rows = run_breakeven_sweep(
        Untimed(), PROMPTS, settings=[Speculation(steps=3)], concurrencies=[1], max_new_tokens=20
    )
    assert rows.rows[0].needed == pytest.approx(2.2) and rows.rows[0].speed.prompts == 9
    assert any("1 of 20 batches were not timed" in note for note in rows.notes)


class Differing(Scripted):
    """Speculative answers to the last prompt end late or early, or differ where plain text is never the same again."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def decode(self, **request: Any) -> Any:
        made = super().decode(**request)
        if PROMPTS[-1].input_ids not in request["prompts"]:
            return made
        tokens = list(made[-1].tokens)
        if self.way == "late" and not self.now:
            tokens = tokens[:5]
        if self.way == "early" and self.now:
            tokens = tokens[:5]
        if self.way == "unchecked":
            tokens[3] = 900 if self.now else 901
            tokens[0] += request.get("gaps", False)
        gaps = [0.0] * len(tokens) if request.get("gaps") else []
        return [*made[:-1], made[-1].model_copy(update={"tokens": tokens, "gaps": gaps})]


@pytest.mark.parametrize("way", ["late", "early"])
def test_an_end_that_is_passed_over_is_a_fault(way: str) -> None:
    report = sweep(Differing(way), settings=[Speculation(steps=3)], concurrencies=[1])
    assert [(d.id, d.index, d.past_the_end) for d in report.differences] == [("p9", 5, True)]
    assert report.verdict == "broken" and "end-of-sequence token was passed over: p9 at token 5" in str(report.reasons)


def test_differences_that_nobody_could_judge_are_told_and_no_reason_to_serve() -> None:
    report = sweep(Differing("unchecked"), settings=[Speculation(steps=3)], concurrencies=[1])
    assert [(d.id, d.index, d.gap) for d in report.differences] == [("p9", 3, None)]
    assert report.verdict == "broken" and "for no difference is it known" in str(report.reasons)
    assert any("1 of 1 answers that differ from plain text are unchecked" in note for note in report.notes)


class Merged(Scripted):
    """The server told its passes, but not in which order."""

    def decode(self, **request: Any) -> Any:
        made = super().decode(**request)
        passes = [[replace(p, start=-1) for p in r.passes] for r in made]
        return [r.model_copy(update={"passes": each}) for r, each in zip(made, passes, strict=True)]


def test_passes_of_unknown_order_are_all_counted_and_the_report_says_so() -> None:
    known = sweep(Scripted(right=1), settings=[Speculation(steps=3)], concurrencies=[1])
    report = sweep(Merged(right=1), settings=[Speculation(steps=3)], concurrencies=[1])
    assert (known.unordered_prompts, report.unordered_prompts) == (0, 10)
    assert report.acceptance.verify_passes == known.acceptance_all_passes.verify_passes == 200
    assert known.acceptance.verify_passes == 190, "the cut ones are known"
    assert any("merged chunks of 10 of 10 answers" in note for note in report.notes)
    assert not any("merged chunks" in note for note in known.notes)


class OneByOne(Scripted):
    def generate(self, *, input_ids: list[int], max_new_tokens: int, steps: int, plain: bool) -> GenerateReply:
        self.now = None if plain else Speculation(steps=steps)
        return super().decode(prompts=[input_ids], max_new_tokens=max_new_tokens, concurrency=1)[0]

    def configure(self, speculation: Speculation | None) -> EngineFacts:
        raise AssertionError("the reference engine decodes both ways in turn")


def test_the_reference_engine_decodes_both_ways_in_turn_and_finds_the_same() -> None:
    options = {"settings": [Speculation(steps=3)], "temperature": 0.0, "max_new_tokens": 40, "plain_prompts": 3}
    turns = probe_with(OneByOne(), PROMPTS, engine="reference", concurrencies=[1], **options)
    phases = probe_with(Scripted(), PROMPTS, engine="sglang", concurrencies=[1], **options)
    assert turns.acceptance == phases.acceptance and turns.speed == phases.speed
    assert turns.speedup_interval == phases.speedup_interval
    measured = breakeven_with(
        OneByOne(), PROMPTS, engine="reference", settings=[Speculation(steps=3)], concurrencies=[1], max_new_tokens=20
    )
    assert measured.rows[0].needed == pytest.approx(2.2)


class Uneven(Scripted):
    """Passes accept none to two drafts; those that reach beyond the answer's end, all three."""

    def decode(self, **request: Any) -> Any:
        made = []
        for r in super().decode(**request):
            last = r.prompt_length + len(r.tokens) - 1
            passes = [replace(p, accepted=p.start // 3 % 3 if p.start + 4 <= last else 3) for p in r.passes]
            made.append(r.model_copy(update={"passes": passes}))
        return made


class UnevenOneByOne(OneByOne, Uneven):
    pass


@pytest.mark.parametrize(("engine", "client"), [("reference", UnevenOneByOne()), ("sglang", Uneven())])
def test_what_is_shown_while_it_runs_counts_as_the_report_does(engine: str, client: Any) -> None:
    notes: list[str] = []
    report = probe_with(
        client, PROMPTS, engine=engine, settings=[Speculation(steps=3)], concurrencies=[1], temperature=0.0,
        max_new_tokens=39, plain_prompts=3, progress=lambda done, total, note: notes.append(note),
    )  # fmt: skip
    shown = [float(note.removeprefix("acceptance length ")) for note in notes if note]
    accepted = accumulate(sum(row.accepted) for row in report.rows)
    passes = accumulate(len(row.accepted) for row in report.rows)
    assert shown == [round(1 + drafts / count, 2) for drafts, count in zip(accepted, passes, strict=True)]
    assert shown[-1] == round(report.acceptance.acceptance_length, 2)
    assert shown[-1] < round(report.acceptance_all_passes.acceptance_length, 2)
