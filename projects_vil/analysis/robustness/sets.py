"""The sets that classifiers of ImageNet's 1000 classes are evaluated on, and how their folders are read, as published.

In a folder of data lie the three of ImageNet-V2, ``imagenet-a``, ``imagenet-r`` and ``sketch`` as they unpack,
``real.json`` (ImageNet-Real's labels for ``val``), ``imagenet-c/CORRUPTION/SEVERITY`` (what its five archives hold, in
one folder), ``val`` (ImageNet's validation images, sorted into a folder a class: the archive unpacks flat), and
``bg_challenge`` with ``in_to_in9.json`` (ImageNet-9 and what its authors count as each of its nine classes).
"""

import dataclasses
import functools
import importlib.resources
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from timm.data import ImageNetInfo

from backbones import InputError
from backbones.utils.errors import check_choice
from projects_vil.analysis.robustness.scoring import CORRUPTIONS, SEVERITIES
from projects_vil.data import IMAGE_SUFFIXES

REAL_LABELS = "real.json"
# Of MadryLab/backgrounds_challenge: class number in 0..999, as text -> number of a class below, or -1 for none.
IN9_LABELS = "in_to_in9.json"
IN9_CLASSES = (
    *("00_dog", "01_bird", "02_wheeled vehicle", "03_reptile", "04_carnivore", "05_insect", "06_musical instrument"),
    *("07_primate", "08_fish"),
)
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.IGNORECASE)
_NUM_CLASSES, _NUM_VAL = 1000, 50_000


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """A set as it is published.

    Attributes:
        title: what it is called in tables.
        folder: of its images, in the folder of data.
        num_images: published; of each severity for ImageNet-C.
        classes: ``"wordnet"`` for folders named by WordNet ids, ``"number"`` for folders 0 to 999, ``"in9"`` for
            ``IN9_CLASSES``.
        subset: timm's list of the 200 classes that ImageNet-A and -R have; None for all 1000.
        labels: a file beside the folder that says what is right; None where the folders do.
        cropped: whether a crop is taken of its images; False for crops of 224 pixels.
    """

    title: str
    folder: str
    num_images: int
    classes: str = "wordnet"
    subset: str | None = None
    labels: str | None = None
    cropped: bool = True


def _in9(title: str, folder: str) -> ImageSet:
    path = f"bg_challenge/{folder}/val"
    return ImageSet(f"ImageNet-9 {title}", path, 4_050, "in9", labels=IN9_LABELS, cropped=False)


# Where the numbers are from: results/README.md of timm (val, V2), LS appendix D (A), README.md of hendrycks/robustness
# (R), the dataset card of imagenet_sketch in huggingface/datasets (Sketch), whose own README says 50,000, and "Noise or
# Signal", Xiao et al. 2021, whose test sets these of ImageNet-9 are.
ROBUSTNESS_SETS = {
    "val": ImageSet("ImageNet val", "val", _NUM_VAL),
    # Behind val, so that its predictions serve both.
    "real": ImageSet("ImageNet-Real", "val", _NUM_VAL, labels=REAL_LABELS),
    "v2": ImageSet("ImageNet-V2 matched frequency", "imagenetv2-matched-frequency-format-val", 10_000, "number"),
    "v2-threshold": ImageSet("ImageNet-V2 threshold 0.7", "imagenetv2-threshold0.7-format-val", 10_000, "number"),
    "v2-top": ImageSet("ImageNet-V2 top images", "imagenetv2-top-images-format-val", 10_000, "number"),
    "a": ImageSet("ImageNet-A", "imagenet-a", 7_500, subset="imagenet_a"),
    "r": ImageSet("ImageNet-R", "imagenet-r", 30_000, subset="imagenet_r"),
    "sketch": ImageSet("ImageNet-Sketch", "sketch", 50_889),
    "in9": _in9("Original", "original"),
    "in9-same": _in9("Mixed-same", "mixed_same"),
    "in9-rand": _in9("Mixed-rand", "mixed_rand"),
    "c": ImageSet("ImageNet-C", "imagenet-c", _NUM_VAL, cropped=False),
}


@dataclasses.dataclass(frozen=True)
class LabelledFolder:
    """A folder of class folders.

    Attributes:
        path: of the folder.
        classes: name of a class folder that may be in it -> class number in 0..999, in 0..8 for ImageNet-9.
        subset: the classes that may be predicted, ascending; None for all.
    """

    path: Path
    classes: dict[str, int]
    subset: tuple[int, ...] | None = None

    def images(self) -> tuple[list[Path], list[int]]:
        """All image files, by class folder and name, and the class number of each.

        Raises:
            InputError: for a folder without class folders, a class folder that is none of the set's or is empty, and a
                file that is no image by its name.
        """
        paths, labels = [], []
        for folder in self._class_folders():
            names = [entry.name for entry in _entries(folder)]
            if not names:
                raise InputError(f"{folder} is empty: unpack the set again")
            for name in names:
                if not name.lower().endswith(IMAGE_SUFFIXES):
                    raise InputError(f"{folder / name} is no image by its name: take it away, or unpack the set again")
            paths += [folder / name for name in names]
            labels += [self.classes[folder.name]] * len(names)
        return paths, labels

    def _class_folders(self) -> list[Path]:
        entries = _entries(self.path)
        flat = next((entry for entry in entries if _VAL_IMAGE.fullmatch(entry.name)), None)
        if flat is not None:
            raise InputError(
                f"{flat} is in no folder of a class: ImageNet's val archive unpacks flat; sort its images into folders "
                f"of classes, such as {self.path / next(iter(self.classes))}"
            )
        # ImageNet-A and -R have a README.txt beside the class folders.
        folders = [entry for entry in entries if entry.is_dir()]
        if not folders:
            raise InputError(f"{self.path} has no folders of classes, such as {next(iter(self.classes))}")
        for folder in folders:
            if folder.name not in self.classes:
                raise InputError(
                    f"{folder}: {folder.name} is none of the {len(self.classes)} classes of this set: take it away, or "
                    "unpack the set again"
                )
        return folders


def check_sets(names: Sequence[str]) -> list[str]:
    """The sets that are asked for, each once, in the order of ``ROBUSTNESS_SETS``.

    Raises:
        InputError: for an unknown one, and where none is named.
    """
    if not names:
        raise InputError(f"no set is named (--sets): there are {', '.join(ROBUSTNESS_SETS)}")
    for name in names:
        check_choice("set", name, ROBUSTNESS_SETS)
    return [name for name in ROBUSTNESS_SETS if name in names]


def missing_parts(data: Path, name: str) -> list[str]:
    """What a set needs and is not in the folder of data: paths relative to it; none where all is there."""
    the_set = ROBUSTNESS_SETS[name]
    missing = [] if (data / the_set.folder).is_dir() else [the_set.folder]
    if the_set.labels is not None and not (data / the_set.labels).is_file():
        missing.append(the_set.labels)
    return missing


def labelled_folder(data: Path, name: str, *inside: str) -> LabelledFolder:
    """The images of a set, or of the folders ``inside`` it: a corruption and a severity of ImageNet-C."""
    the_set = ROBUSTNESS_SETS[name]
    if the_set.classes == "number":
        classes = {str(number): number for number in range(_NUM_CLASSES)}
    elif the_set.classes == "in9":
        classes = {name: number for number, name in enumerate(IN9_CLASSES)}
    else:
        classes = wordnet_classes()
    subset = None
    if the_set.subset is not None:
        ids = _subset_ids(the_set.subset)
        classes = {wordnet_id: classes[wordnet_id] for wordnet_id in ids}
        subset = tuple(sorted(classes.values()))
    return LabelledFolder(Path(data, the_set.folder, *inside), classes, subset)


@functools.cache
def wordnet_classes() -> dict[str, int]:
    """WordNet id -> class number in 0..999, its place in the sorted list."""
    return {wordnet_id: number for number, wordnet_id in enumerate(sorted(ImageNetInfo().label_names()))}


def _subset_ids(subset: str) -> list[str]:
    """WordNet ids of a set of 200 classes, as timm ships them."""
    return (importlib.resources.files("timm.data") / "_info" / f"{subset}_synsets.txt").read_text().split()


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, sorted, without what is hidden."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from error


def corruption_folders(data: Path) -> dict[str, list[int]]:
    """Corruption -> its severities that are there, of the 15 that mCE is of; what else is in the folder is left out.

    Raises:
        InputError: where there is none.
    """
    root = data / ROBUSTNESS_SETS["c"].folder
    found = {name: [level for level in SEVERITIES if (root / name / str(level)).is_dir()] for name in CORRUPTIONS}
    if not any(found.values()):
        raise InputError(f"{root} has no CORRUPTION/SEVERITY folders, such as {CORRUPTIONS[0]}/1")
    return found


def real_labels(data: Path, paths: Sequence[Path]) -> list[Collection[int]]:
    """ImageNet-Real's labels of images of ``val``, which their names number from 1; none for an image left out.

    Raises:
        InputError: for another file than the published one, and a name without a number.
    """
    path = data / REAL_LABELS
    try:
        lists = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not _are_real_labels(lists):
        raise InputError(f"{path} is not ImageNet-Real's: a list of {_NUM_VAL} lists of class numbers 0 to 999")
    labels = []
    for image in paths:
        match = _VAL_IMAGE.fullmatch(image.name)
        if match is None or not 1 <= int(match[1]) <= _NUM_VAL:
            raise InputError(
                f"{image}: {REAL_LABELS} goes by numbers from ILSVRC2012_val_00000001.JPEG to _{_NUM_VAL:08d}: "
                "give the image its published name"
            )
        labels.append(frozenset(lists[int(match[1]) - 1]))
    return labels


def in9_labels(data: Path) -> list[Collection[int]]:
    """For each class of ImageNet-9 the class numbers in 0..999 that are right.

    Raises:
        InputError: for another file than the published one.
    """
    path = data / IN9_LABELS
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    numbers = range(-1, len(IN9_CLASSES))
    is_published = isinstance(found, dict) and found.keys() == {str(number) for number in range(_NUM_CLASSES)}
    if not is_published or not all(type(value) is int and value in numbers for value in found.values()):
        raise InputError(
            f"{path} is not that of MadryLab/backgrounds_challenge: numbers 0 to 999 and what each is, "
            f"-1 to {numbers[-1]}"
        )
    return [frozenset(int(key) for key, value in found.items() if value == number) for number in numbers[1:]]


def _are_real_labels(lists: object) -> bool:
    return (
        isinstance(lists, list)
        and len(lists) == _NUM_VAL
        and all(isinstance(labels, list) for labels in lists)
        and all(type(label) is int and 0 <= label < _NUM_CLASSES for labels in lists for label in labels)
    )
