"""Selection of the cases that ``make test`` runs. The slow run has all of them."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], fast: Collection[Any]) -> list:
    """Return parameters of a test. All cases are ``slow`` except the ones in ``fast``, named by their first value.

    Raises:
        ValueError: If a name in ``fast`` is not a case.
    """
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    unknown = set(fast) - {case[0] for case in cases}
    if unknown:
        raise ValueError(f"no such case: {unknown}")
    return [pytest.param(*case, marks=() if case[0] in fast else pytest.mark.slow) for case in cases]
