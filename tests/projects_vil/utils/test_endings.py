"""Processes that are no more are named, with what may have ended them."""

import os
import signal

import pytest
import torch

from projects_vil.utils import RunEnded, explain_ending, process_ended, run_tool


class Killed(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_was_killed_is_named(capsys):
    with pytest.raises(SystemExit) as caught:
        run_tool(lambda: list(torch.utils.data.DataLoader(Killed(), num_workers=1)))
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: a data loading process ") and said.endswith("fewer DATALOADER.NUM_WORKERS\n")
    assert "often" in said and said.count("\n") == 1


def be_killed(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_training_process_that_was_killed_is_named(capsys):
    def main():
        torch.multiprocessing.start_processes(be_killed, nprocs=1, start_method="fork")

    with pytest.raises(SystemExit) as caught:
        run_tool(main)
    assert caught.value.code == 128 + signal.SIGKILL
    assert capsys.readouterr().err == ("error: process 0 was killed by SIGKILL (signal 9), often for want of memory\n")


@pytest.mark.parametrize(
    "text, said",
    [
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:5", "another process of this run has ended"),
        ("DataLoader worker (pid 12) is killed by signal: Killed. ", "a data loading process was killed by SIGKILL"),
        ("DataLoader worker (pid(s) 12, 13) exited unexpectedly", "a data loading process ended unexpectedly"),
        ("CUDA error: an illegal memory access was encountered", None),
        ("shape '[2]' is invalid for input of size 3", None),
    ],
)
def test_what_torch_says_of_it(text, said):
    ended = explain_ending(RuntimeError(text))
    assert (ended is None) if said is None else str(ended).startswith(said)


def test_a_process_with_a_status_of_its_own():
    ended = process_ended("process 1 of 2", 3)
    assert isinstance(ended, RunEnded) and (str(ended), ended.status) == ("process 1 of 2 ended with status 3", 3)
