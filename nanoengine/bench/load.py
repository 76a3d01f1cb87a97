"""When requests are sent, and how long they are."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Load:
    """due: seconds after the start, rising, of each request; None for a closed loop (a new one when one ends).

    input_lens, output_lens: tokens of each request.
    """

    input_lens: list[int]
    output_lens: list[int]
    due: list[float] | None = None

    def __len__(self) -> int:
        return len(self.input_lens)


def drawn(
    num_requests: int, input_len: tuple[int, int], output_len: tuple[int, int], *, rate: float | None, seed: int = 0
) -> Load:
    """Lengths uniform between least and largest; arrivals a Poisson process of ``rate`` a second, None: closed loop.

    Equal for equal arguments. Errors: ValueError naming the argument.
    """
    for what, (low, high) in (("input_len", input_len), ("output_len", output_len)):
        if not 1 <= low <= high:
            raise ValueError(f"{what} must be least and largest with 1 <= least <= largest, got {low} and {high}")
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"rate must be above 0 requests a second, got {rate}")
    draw = random.Random(seed)
    lens = [(draw.randint(*input_len), draw.randint(*output_len)) for _ in range(num_requests)]
    due, now = [], 0.0
    for _ in range(num_requests if rate is not None else 0):
        due.append(now)
        now += draw.expovariate(rate)
    return Load([a for a, _ in lens], [b for _, b in lens], due if rate is not None else None)


def read_trace(path: str | Path, *, rate: float | None = None, seed: int = 0) -> Load:
    """From JSONL, one {"input_len": n, "output_len": n, "at": seconds} a line.

    at: all lines or none; without it arrivals are Poisson of ``rate``, or a closed loop.
    Errors: ValueError naming the line.
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append((int(row["input_len"]), int(row["output_len"]), row.get("at")))
            if min(rows[-1][:2]) < 1 or (rows[-1][2] is not None and not rows[-1][2] >= 0):
                raise ValueError("lengths must be at least 1, and at not negative")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}; wanted input_len, output_len and perhaps at") from None
    if not rows:
        raise ValueError(f"{path} has no line")
    timed = [row[2] is not None for row in rows]
    if any(timed) and not all(timed):
        raise ValueError(f"{path}: at must stand in all lines or in none")
    if all(timed):
        rows.sort(key=lambda row: row[2])
        return Load([a for a, _, _ in rows], [b for _, b, _ in rows], [at - rows[0][2] for _, _, at in rows])
    due = None if rate is None else drawn(len(rows), (1, 1), (1, 1), rate=rate, seed=seed).due
    return Load([a for a, _, _ in rows], [b for _, b, _ in rows], due)


def text_prompt(num_words: int, number: int, seed: int | str = 0) -> str:
    """So many short words, different for each request: about a token each in English vocabularies."""
    draw = random.Random(f"{seed} {number}")
    return " ".join(draw.choices(WORDS, k=num_words))


def id_prompt(num_tokens: int, number: int, vocab_size: int, seed: int | str = 0) -> list[int]:
    """So many random token ids in [0, vocab_size)."""
    return random.Random(f"{seed} {number}").choices(range(vocab_size), k=num_tokens)


WORDS = tuple(
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door".split()
)
