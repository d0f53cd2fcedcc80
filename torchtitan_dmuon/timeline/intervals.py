"""Sets of times: sorted lists of disjoint (start, end) pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Intervals = list[tuple[float, float]]


def union(pairs: Iterable[tuple[float, float]]) -> Intervals:
    """Return the set of all times in any of the pairs; empty ones are left out."""
    result: Intervals = []
    for start, end in sorted(pairs):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def intersect(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """Return the times in both sets."""
    result: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def subtract(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """Return the times in `a` that are not in `b`."""
    result: Intervals = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        left = start
        k = j
        while k < len(b) and b[k][0] < end:
            if left < b[k][0]:
                result.append((left, b[k][0]))
            left = max(left, b[k][1])
            k += 1
        if left < end:
            result.append((left, end))
    return result


def length(a: Iterable[tuple[float, float]]) -> float:
    """Return the time in a set."""
    return sum(end - start for start, end in a)
