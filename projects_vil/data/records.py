"""Records of datasets, read and checked by the first process of each machine, and mapped by the others."""

import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.utils import comm

from backbones import ConfigError

# What was read, by what it depends on.
_KEPT: dict[tuple, "MappedRecords"] = {}


class MappedRecords(Sequence):
    """Objects, each pickled, in a file that processes map, so that they are in a machine's memory once.

    detectron2's ``DatasetFromList`` shares them with the loading processes, and not between training processes.

    Args:
        path: as given to :meth:`write`; the files may be removed once they are mapped.
    """

    def __init__(self, path: str | Path) -> None:
        self._content = np.memmap(path, np.uint8, "r")
        self._ends = np.load(f"{path}.npy", mmap_mode="r")

    @classmethod
    def write(cls, path: str | Path, objects: Iterable[Any]) -> "MappedRecords":
        """Write objects one by one into ``path``, and the ends of their pickles beside it, and map them."""
        ends = []
        with open(path, "wb") as file:
            for one in objects:
                pickle.dump(one, file, protocol=pickle.HIGHEST_PROTOCOL)
                ends.append(file.tell())
        np.save(f"{path}.npy", np.array(ends, np.int64))
        return cls(path)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Any:
        # The index of a range, which raises for one beyond the end.
        index = range(len(self))[index]
        return pickle.loads(self._content[self._ends[index - 1] if index else 0 : self._ends[index]])


def kept(key: tuple) -> MappedRecords | None:
    """Return what :func:`read_once` has kept for a key."""
    return _KEPT.get(key)


def forget_records() -> None:
    _KEPT.clear()


def read_once(read: Callable[[Callable[[tuple, Iterable[Any]], None]], Any]) -> Any:
    """Let the first process of each machine read datasets; all processes call this.

    Args:
        read: takes a function (key, objects), which keeps objects for :func:`kept` in all processes of the machine.

    Returns:
        What ``read`` returns, in all processes.

    Raises:
        ConfigError: in all processes, if any ``read`` raises one, or what they return differs between machines.
    """
    files: dict[tuple, str] = {}
    outcome = None
    with tempfile.TemporaryDirectory(prefix="records_") as folder:

        def keep(key: tuple, objects: Iterable[Any]) -> None:
            files[key] = os.path.join(folder, str(len(files)))
            _KEPT[key] = MappedRecords.write(files[key], objects)

        if comm.get_local_rank() == 0:
            try:
                outcome = read(keep), files, ""
            except ConfigError as error:
                outcome = None, {}, str(error)
        outcomes = comm.all_gather(outcome)
        content, files, _ = outcomes[comm.get_rank() - comm.get_local_rank()]
        for key in files.keys() - _KEPT.keys():
            _KEPT[key] = MappedRecords(files[key])
        # The files are removed when all have mapped them.
        comm.synchronize()
    for other, _, message in filter(None, outcomes):
        if message:
            raise ConfigError(message)
        if other != content:
            raise ConfigError("the machines have different files of the datasets DATASETS.TRAIN and DATASETS.TEST")
    return content
