"""The exceptions and messages for a user's mistakes."""

import pytest

from backbones.errors import ConfigError, UnknownKeywordError, closest, explain_unknown_keywords


def paint(wall: str, *, colour: str = "white", coats: int = 1) -> str:
    """Paint a wall."""
    return f"{wall}: {coats} x {colour}"


def test_names_the_closest_candidate():
    assert closest("vil_smal", ["vil_tiny", "vil_small"]) == "; did you mean 'vil_small'?"
    assert closest("vil_smal", ["vil_tiny", "vil_small"], most=3) == "; did you mean 'vil_small' or 'vil_tiny'?"


def test_known_keywords_pass():
    checked = explain_unknown_keywords(paint)
    assert checked("north", colour="red", coats=2) == paint("north", colour="red", coats=2)
    assert (checked.__name__, checked.__doc__) == ("paint", "Paint a wall.")


@pytest.mark.parametrize("keyword, hint", [("color", "did you mean 'colour'"), ("xyz", "known: wall, colour, coats")])
def test_an_unknown_keyword_names_the_function_and_the_way_out(keyword, hint):
    with pytest.raises(UnknownKeywordError, match=f"paint has no keyword '{keyword}'.*{hint}") as caught:
        explain_unknown_keywords(paint)("north", **{keyword: 1})
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, TypeError)
    assert "\n" not in str(caught.value)
