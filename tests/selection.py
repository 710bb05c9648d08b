"""Which of many similar cases ``make test`` has, and which only the slow run."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], fast: Collection[Any]) -> list:
    """Parameters of a test, all ``slow`` but those in ``fast``; a case of several is known by its first.

    Raises:
        ValueError: for one of ``fast`` that is not a case.
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    unknown = set(fast) - {case[0] for case in cases}
    if unknown:
        raise ValueError(f"no such case: {unknown}")
    return [pytest.param(*case, marks=() if case[0] in fast else pytest.mark.slow) for case in cases]
