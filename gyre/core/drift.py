"""How far the trainer's probabilities are from the recorded ones: ratio histograms, and the alarm on a growing gap."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

RATIO_EDGES = (0.5, 0.8, 0.95, 0.995, 1.005, 1.05, 1.25, 2.0, 5.0)
"""Upper edges, inclusive, of the bins of a token's importance ratio ρ; one more bin holds what is above the last."""
WINDOW = 8
"""Measured steps that the alarm looks at."""
RISE = 1e-3
"""Growth of the mean gap over the window that is an alarm, when it is also half of where the window began."""

Histograms = dict[int, list[int]]
"""Policy version that sampled a token → number of tokens per bin of RATIO_EDGES."""


def ratio_histograms(ratios: Iterable[float], versions: Iterable[int]) -> Histograms:
    made: Histograms = {}
    for ratio, version in zip(ratios, versions, strict=True):
        made.setdefault(version, [0] * (len(RATIO_EDGES) + 1))[bisect_left(RATIO_EDGES, ratio)] += 1
    return made


def merged(histograms: Iterable[Histograms]) -> Histograms:
    total: Histograms = {}
    for one in histograms:
        for version, counts in one.items():
            total[version] = [a + b for a, b in zip(total.get(version, [0] * len(counts)), counts, strict=True)]
    return total


def gap_rise(gaps: Sequence[float]) -> float:
    """How much mean |Δ log π| grew over the last WINDOW values, by a least-squares line; 0 when that is no alarm."""
    recent = gaps[-WINDOW:]
    if len(recent) < WINDOW:
        return 0.0
    middle = (WINDOW - 1) / 2
    mean = sum(recent) / WINDOW
    offsets = [x - middle for x in range(WINDOW)]
    slope = sum(x * gap for x, gap in zip(offsets, recent, strict=True)) / sum(x * x for x in offsets)
    rise, start = slope * (WINDOW - 1), mean - slope * middle
    return rise if rise > max(RISE, start / 2) else 0.0
