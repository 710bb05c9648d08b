"""Annotations and images."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from projects_vil.data.checking import KINDS
from tests.faults.fault import OUTPUT, TRAIN, Fault, Spoil
from tests.faults.spoiling import cut_off, every, made_a_folder, made_a_pipe, removed, written
from tests.projects_vil.data.checking.faults import FAULTS as OF_A_FILE
from tests.projects_vil.data.checking.faults import spoil as spoil_file

_MASKS = "train_net.py --config-file mask.yaml"
_SHAPES = "datasets/shapes/annotations/instances_train.json"


def _found(name: str) -> Fault:
    kind = KINDS[OF_A_FILE[name][0]]
    words = "|".join(re.escape(words) for words in (kind.one, kind.what))
    return Fault(
        name,
        "check_dataset.py own/annotations.json own/images",
        spoil=lambda folder: spoil_file(folder / "own", name),
        status=int(kind.level == "error"),
        line=f"^{kind.level}: [0-9]+ ({words})$",
    )


def _content(change: Callable[[dict], object]) -> Spoil:
    """The training annotations of the shapes, changed."""

    def rewrite(folder: Path) -> None:
        content = json.loads((folder / _SHAPES).read_text())
        change(content)
        (folder / _SHAPES).write_text(json.dumps(content))

    return rewrite


def _own(key: str, *entry: str) -> str:
    return f'DATASETS.{key} "[[{", ".join(map(repr, entry))}]]"'


# A run whose data is read has a log, in which the reason of its end stands too.
_LOG = ("output", "output/log.txt")


def _in_training(name: str, spoil: Spoil | None = None, command: str = TRAIN) -> Fault:
    return Fault(name, command, spoil, makes=_LOG)


FAULTS = (
    *map(_found, OF_A_FILE),
    # -- of a file as a whole --------------------------------------------------------------------------
    Fault("annotations missing", "check_dataset.py own/absent.json own/images"),
    Fault(
        "annotations that break off",
        "check_dataset.py own/annotations.json own/images",
        cut_off("own/annotations.json"),
    ),
    Fault(
        "annotations that are a list",
        "check_dataset.py own/annotations.json own/images",
        written("own/annotations.json", "[]"),
    ),
    Fault(
        "annotations without images",
        "check_dataset.py own/annotations.json own/images",
        written("own/annotations.json", '{"annotations": [], "categories": []}'),
    ),
    Fault("annotations that are a folder", "check_dataset.py own own/images"),
    Fault("folder of images missing", "check_dataset.py own/annotations.json own/absent"),
    Fault("cleaned copy over a file", "check_dataset.py own/annotations.json own/images --fix small.yaml"),
    Fault("cleaned copy into no folder", "check_dataset.py own/annotations.json own/images --fix absent/clean.json"),
    Fault(
        "list of faults over the annotations",
        "check_dataset.py own/annotations.json own/images --json own/annotations.json",
    ),
    # -- where training meets them ---------------------------------------------------------------------
    _in_training("training on boxes of NaN", _content(lambda c: c["annotations"][0].update(bbox=[float("nan")] * 4))),
    _in_training(
        "training masks on polygons of 1e12",
        _content(lambda c: c["annotations"][0]["segmentation"][0].__setitem__(0, 1e12)),
        _MASKS,
    ),
    _in_training(
        "training masks without any", _content(lambda c: [a.pop("segmentation") for a in c["annotations"]]), _MASKS
    ),
    _in_training(
        "training with corners for widths",
        _content(
            lambda c: [
                a.update(bbox=[*a["bbox"][:2], a["bbox"][0] + a["bbox"][2], a["bbox"][1] + a["bbox"][3]])
                for a in c["annotations"]
            ]
        ),
    ),
    _in_training(
        "training with fractions for pixels",
        _content(lambda c: [a.update(bbox=[v / 100 for v in a["bbox"]]) for a in c["annotations"]]),
    ),
    _in_training("training without objects", _content(lambda c: c.update(annotations=[]))),
    _in_training("training on a file that breaks off", cut_off(_SHAPES)),
    Fault("training without the annotations", TRAIN, removed(_SHAPES)),
    Fault(
        "training on images that break off, which the header does not tell",
        f"{TRAIN} DATALOADER.NUM_WORKERS 1",
        every("datasets/shapes/train/*.jpg", cut_off),
        makes=OUTPUT,
    ),
    _in_training("training on images that are gone", every("datasets/shapes/train/*.jpg", removed)),
    _in_training("training on an image that is a pipe", every("datasets/shapes/train/*1.jpg", made_a_pipe)),
    _in_training("training on an image that is a folder", every("datasets/shapes/train/*1.jpg", made_a_folder)),
    Fault("training for more classes than there are", f"{TRAIN} MODEL.RETINANET.NUM_CLASSES 80"),
    Fault("training on an unknown dataset", f"{TRAIN} DATASETS.TRAIN \"('shapes_trian',)\""),
    Fault("training on none", f"{TRAIN} DATASETS.TRAIN ()"),
    Fault("a dataset of two entries", f"{TRAIN} {_own('COCO', 'mine', 'own/annotations.json')}"),
    Fault(
        "a dataset under the name of another",
        f"{TRAIN} {_own('COCO', 'coco_2017_val', 'own/annotations.json', 'own/images')}",
    ),
    Fault("a drawn dataset over other files", "make_shapes_dataset.py own --overwrite"),
    Fault("a drawn dataset of no images", "make_shapes_dataset.py drawn --num-train 0"),
    Fault("a subset over its source", "make_coco_subset.py own/annotations.json own/annotations.json"),
)
