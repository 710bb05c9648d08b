"""A run whose second process fails."""

import argparse

from detectron2.utils import comm


def run(args: argparse.Namespace) -> None:
    if comm.get_rank() == 1:
        read_a_file()
    comm.synchronize()


def read_a_file() -> None:
    raise RuntimeError("Connection refused")
