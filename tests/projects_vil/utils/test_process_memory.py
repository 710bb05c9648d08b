"""Memory that is measured in a process of its own."""

import functools
import os

import pytest
import torch

from backbones import InputError
from projects_vil.utils import memory_of, peak_in_new_process

FACTS = {"what": "this", "instead": "that"}


def fill(number: int, process: int):
    """What fills ``number`` bytes for a moment, and is in another process."""
    torch.ones(number // 2)
    assert os.getpid() != process and torch.get_num_threads() == 1
    return lambda: torch.ones(number // 4)


def refuse():
    raise InputError("not so")


def end():
    os._exit(9)


@pytest.mark.slow
@pytest.mark.skipif(memory_of() is None, reason="the system does not tell")
def test_the_peak_of_a_call_counts_from_where_it_began(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    peak = peak_in_new_process(functools.partial(fill, 200_000_000, os.getpid()), **FACTS)
    assert 150e6 < peak < 350e6


@pytest.mark.slow
@pytest.mark.skipif(memory_of() is None, reason="the system does not tell")
def test_mistakes_and_a_process_that_is_ended():
    with pytest.raises(InputError, match="^not so$"):
        peak_in_new_process(refuse, **FACTS)
    with pytest.raises(InputError, match="^this: the process that measured the memory has ended: that$"):
        peak_in_new_process(end, **FACTS)
