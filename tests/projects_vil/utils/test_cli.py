"""How a tool ends: one line for a user's mistake, a traceback for ours."""

import pytest
import torch

from backbones import InputError, create_backbone
from projects_vil.utils import run_tool


def ending(main, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        run_tool(main)
    captured = capsys.readouterr()
    assert captured.out == ""
    return caught.value.code, captured.err


def test_nothing_is_added_to_a_good_end(capsys):
    run_tool(lambda: print("fine"))
    assert capsys.readouterr() == ("fine\n", "")


def test_a_mistake_is_one_line(capsys):
    def main():
        raise InputError("there is no config file x.yaml")

    assert ending(main, capsys) == (1, "error: there is no config file x.yaml\n")


def test_an_interrupt_is_one_line(capsys):
    def main():
        raise KeyboardInterrupt

    assert ending(main, capsys) == (130, "interrupted\n")


def test_an_unknown_keyword_is_a_mistake(capsys):
    status, text = ending(lambda: create_backbone("vil_tiny", drop_path=0.1), capsys)
    assert status == 1 and text.startswith("error: create_backbone has no keyword 'drop_path'")
    assert text.count("\n") == 1


class Broken(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int):
        raise InputError("cannot read the image 7.jpg")


def test_a_mistake_in_a_data_loaders_worker_is_one_line(capsys):
    loader = torch.utils.data.DataLoader(Broken(), num_workers=1)
    assert ending(lambda: list(loader), capsys) == (1, "error: cannot read the image 7.jpg\n")


def fail(rank: int, error: type[Exception]) -> None:
    raise error("no dataset of that name")


def test_a_mistake_in_a_training_process_is_one_line(capsys):
    def main():
        torch.multiprocessing.start_processes(fail, (InputError,), nprocs=1, start_method="fork")

    assert ending(main, capsys) == (1, "error: no dataset of that name\n")


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_tool(lambda: 1 / 0)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException):
        run_tool(lambda: torch.multiprocessing.start_processes(fail, (KeyError,), nprocs=1, start_method="fork"))
