"""Medians and percentiles of a few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed (nearest rank).

    Errors: ValueError if there is no value, or percent is outside (0, 100].
    """
    if not values or not 0 < percent <= 100:
        raise ValueError(f"need values and 0 < percent <= 100, got {len(values)} values and {percent}")
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def summarise(blocks: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of values measured in blocks: median and p90 of all, and the least of the blocks' medians.

    On a machine with other work the least median is the steadier figure: a block that was not
    disturbed shows it. Errors: ValueError if there is no value.
    """
    values = [value for block in blocks for value in block]
    return {
        "median": median(values) if values else percentile(values, 50),
        "p90": percentile(values, 90),
        "best_block_median": min(median(block) for block in blocks if block),
    }
