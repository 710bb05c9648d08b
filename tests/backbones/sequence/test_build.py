"""Keywords of the creators: each that cannot be is refused in one line that names it."""

import re
from pathlib import Path

import pytest

from backbones.sequence import create_char_lm, create_sequence_encoder
from backbones.utils.errors import InputError
from tests.backbones.sequence.helpers import SMALL_CHAR_LM, SMALL_ENCODER

CREATORS = {"encoder": (create_sequence_encoder, SMALL_ENCODER), "char_lm": (create_char_lm, SMALL_CHAR_LM)}
COMMON = [
    ({"windowsize": 4}, "has no keyword 'windowsize'; did you mean 'window_size'?"),
    ({"vocab_size": 0}, "vocab_size=0: it is a whole number, 1 or more"),
    ({"dim": 8.0}, "dim=8.0: it is a whole number"),
    ({"depth": True}, "depth=True: it is a whole number"),
    ({"hidden_dim": "12"}, "hidden_dim='12': it is a whole number"),
    ({"num_heads": 3}, "num_heads=3 does not divide dim=8"),
    ({"dropout": 1.0}, "dropout=1.0: it is at least 0 and below 1"),
    ({"attention_dropout": -0.1}, "attention_dropout=-0.1: it is at least 0"),
    ({"dropout": None}, "dropout=None"),
    ({"dropout": float("nan")}, "dropout=nan"),
]
CASES = [(kind, *case) for kind in CREATORS for case in COMMON]
CASES += [
    ("encoder", {"window_size": 0, "rank": 0}, "window_size=0 and rank=0: a token sees nothing"),
    ("encoder", {"window_size": -1}, "window_size=-1: it is a whole number, 0 or more"),
    ("encoder", {"rank": -1}, "rank=-1: it is a whole number, 0 or more"),
    ("encoder", {"max_length": 0}, "max_length=0"),
    ("encoder", {"class_token": 1}, "class_token=1: it is True, False or 'last_layer'"),
    ("char_lm", {"rank": 0}, "rank=0: it is a whole number, 1 or more"),
    ("char_lm", {"window_size": 0}, "window_size=0: it is a whole number, 1 or more"),
    ("char_lm", {"segment_length": 0}, "segment_length=0"),
    ("char_lm", {"memory_length": 0}, "memory_length=0"),
    ("char_lm", {"memory_length": 14}, "memory_length=14 is no multiple of segment_length=4"),
    ("char_lm", {"memory_length": 4}, "memory_length=4 is below window_size=5"),
    ("char_lm", {"dim": 9, "num_heads": 3}, "dim=9: it is even"),
]


@pytest.mark.parametrize("kind, changes, message", CASES, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_refused(kind, changes, message):
    create, sizes = CREATORS[kind]
    with pytest.raises(InputError) as caught:
        create(**sizes | changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", CREATORS)
def test_keywords_alone(kind):
    create, sizes = CREATORS[kind]
    with pytest.raises(TypeError):
        create(*sizes.values())


def test_the_page_says_what_runs():
    """docs/sequences.md: its blocks of Python, one after the other, but for that of official weights."""
    page = (Path(__file__).parents[3] / "docs/sequences.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    names = {}
    for block in blocks[:2]:
        exec(block, names)
    assert names["vector"].shape == (2, 1, 64) and names["log_probabilities"].shape == (2, 8, 48)
