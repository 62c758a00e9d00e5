"""Greedy speculative text is the plain text: where answers part, and whether rounding explains it."""

from collections.abc import Callable, Sequence

from ray_eagle.probing.phase import Replies
from ray_eagle.probing.reports import Difference, ProbePrompt
from ray_eagle.serving.engine import Speculation
from ray_eagle.serving.messages import GenerateReply

MAX_GAP = 0.5
"""A first difference from plain text is rounding when the two best tokens were this close in log-probability: four steps of
bfloat16 at logits of 16 to 32. Seen with SGLang 0.5.17 on an H200: 150 of 151 at 0.25 or less, one at 0.375; in float16 at
most 0.03. Beyond it the engine verified wrongly: then gaps are those of any two tokens, 1 to 3."""
SHOWN = 3


def differences_from(
    prompts: Sequence[ProbePrompt],
    replies: Sequence[GenerateReply],
    plain: dict[int, GenerateReply],
    gaps: dict[int, GenerateReply] | None = None,
) -> list[Difference]:
    """Each prompt whose two answers differ, and where. `gaps`: plain answers decoded again, with the gaps of each token."""
    found = []
    for number, reference in plain.items():
        if reference.tokens == replies[number].tokens:
            continue
        index = first_difference(reference.tokens, replies[number].tokens)
        again = (gaps or {}).get(number)
        # only if it came the same way can it say how close the choice was
        same = again is not None and again.tokens[:index] == reference.tokens[:index] and index < len(again.gaps)
        gap = again.gaps[index] if again is not None and same else None
        shorter = min(len(reference.tokens), len(replies[number].tokens))
        found.append(Difference(id=prompts[number].id, index=index, gap=gap, past_the_end=index == shorter))
    return found


def plain_gaps(
    decode: Callable[..., list[GenerateReply]],
    prompts: Sequence[ProbePrompt],
    pairs: Sequence[tuple[Replies, Replies]],
) -> Replies:
    """Plain answers again, up to the last first difference of each, with the gaps between their two best tokens.

    `decode`: as in `BatchClient`, of a server that decodes plainly.
    """
    until: dict[int, int] = {}
    for made, plain in pairs:
        for number, reply in plain.items():
            if made[number].tokens != reply.tokens:
                until[number] = max(until.get(number, 0), first_difference(reply.tokens, made[number].tokens))
    return {
        number: decode(
            prompts=[prompts[number].input_ids], max_new_tokens=index + 1, temperature=0.0, concurrency=1, gaps=True
        )[0]
        for number, index in sorted(until.items())
    }


def faults_of(differing: dict[Speculation, list[Difference]]) -> list[str]:
    """First differences from plain text that rounding does not explain."""
    faults = []
    for setting, differences in differing.items():
        far = [d for d in differences if d.gap is not None and d.gap > MAX_GAP]
        if far:
            shown = ", ".join(f"{d.id} at token {d.index} (gap {d.gap:.2f})" for d in far[:SHOWN])
            faults.append(
                f"With {setting.name}, {len(far)} of {len(differences)} differing answers part from plain greedy text where "
                f"its two best tokens were more than {MAX_GAP} apart in log-probability: {shown}."
            )
        beyond = [d for d in differences if d.past_the_end]
        if beyond:
            shown = ", ".join(f"{d.id} at token {d.index}" for d in beyond[:SHOWN])
            faults.append(
                f"With {setting.name}, {len(beyond)} answers are the plain ones but for where they end, so an end-of-sequence "
                f"token was passed over: {shown}."
            )
    return faults


def unchecked(differences: Sequence[Difference]) -> list[Difference]:
    """Those that may be rounding or not: how close the choice was is not known."""
    return [d for d in differences if d.gap is None and not d.past_the_end]


def unchecked_notes(differing: dict[Speculation, list[Difference]]) -> list[str]:
    """How many differences nobody could judge, in words."""
    return [
        f"With {setting.name}, {len(some)} of {len(differences)} answers that differ from plain text are unchecked: the plain "
        "answer took another way when it was decoded again, so how close its two best tokens were is not known."
        for setting, differences in differing.items()
        if (some := unchecked(differences))
    ]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token in which two answers differ; the shorter length when one begins the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
