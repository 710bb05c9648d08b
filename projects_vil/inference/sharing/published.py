"""A detector's config without what concerns only the machine that it was trained on."""

import os
import re
from collections.abc import Iterator

from detectron2.config import CfgNode

from backbones import InputError
from projects_vil.config import default_config

# Paths, services and names of this machine: nobody else can use them, and they tell of their owner.
_PRIVATE = (
    "MODEL.WEIGHTS",
    "MODEL.DEVICE",
    "OUTPUT_DIR",
    "LOGGING",
    "TEST.EXPECTED_RESULTS",
    "DATASETS.COCO",
    "DATASETS.ADE20K",
    "DATASETS.PROPOSAL_FILES_TRAIN",
    "DATASETS.PROPOSAL_FILES_TEST",
)
_NAMES = ("TRAIN", "TEST")
_PLACE = re.compile(r"(?:^|[\s=:,;'\"])(?:~|/|\\\\|[A-Za-z]:[\\/]|\.{1,2}[\\/]|\w+://)")


def published_config(cfg: CfgNode) -> CfgNode:
    """The config that is shared: what detects and what it was trained with, and no place on a disk.

    Weights, folders, devices, services and the files of datasets are those of detectron2's defaults again. Datasets
    keep their names, but for names that are paths.

    Raises:
        InputError: for another key that holds a path, or one that this project does not know, which nobody could load.
    """
    usual, cfg = default_config(), cfg.clone()
    cfg.defrost()
    for key in _PRIVATE:
        *nodes, leaf = key.split(".")
        ours, theirs = cfg, usual
        for node in nodes:
            ours, theirs = ours[node], theirs[node]
        ours[leaf] = theirs[leaf]
    for key in _NAMES:
        cfg.DATASETS[key] = tuple(name for name in cfg.DATASETS[key] if not (names_a_place(name) or os.sep in name))
    known = dict(_leaves(usual))
    for key, value in _leaves(cfg):
        if key not in known:
            raise InputError(f"the config has {key}, which this project does not know: nobody could load it")
        if value != known[key] and names_a_place(value):
            raise InputError(f"{key} is {value!r}, a place on this machine: set it to its default before it is shared")
    cfg.freeze()
    return cfg


def names_a_place(value: object) -> bool:
    """Whether a text, or one among lists and dicts, has a path from a root, a home or a folder, or an address."""
    return any(_PLACE.search(text) for text in _texts(value))


def _leaves(node: CfgNode, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, CfgNode):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
