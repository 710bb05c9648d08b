"""The classes of a model, as a file or a dataset tells them: their ids, names and colours."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

from detectron2.data import MetadataCatalog
from detectron2.data.catalog import Metadata

# detectron2 knows its categories without any file.
_COCO = "coco_2017_val"


@dataclasses.dataclass(frozen=True)
class Categories:
    """The classes of a model, in the order of its outputs.

    Attributes:
        ids: their ``category_id`` in COCO files.
        names: of the classes.
        colors: RGB in 0..255 of each in drawings, where a dataset says them.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    colors: Sequence[Sequence[int]] | None = dataclasses.field(default=None, compare=False)

    @property
    def metadata(self) -> Metadata:
        """For detectron2's drawings."""
        colors = {} if self.colors is None else {"thing_colors": self.colors}
        return Metadata(thing_classes=list(self.names), **colors)


def unnamed_categories(number: int) -> Categories:
    """Of classes of which nothing is known."""
    ids = tuple(range(1, number + 1))
    return Categories(ids, tuple(f"class {category_id}" for category_id in ids))


def known_categories(
    names: Sequence[str] | None, ids: Sequence[int] | None, *, number: int, datasets: Sequence[str] = ()
) -> Categories:
    """Those that a file says; what it does not say, as older files do not, is looked for in datasets.

    Ids that nobody knows count from 1, and names are ``class 1`` and so on.

    Args:
        names: of the classes; numbers, which older exports have where names were not known, are none.
        ids: of the classes.
        number: of classes.
        datasets: names of them; COCO is asked after them, where the classes are its own.
    """
    if ids is None and names is not None and all(name.isdecimal() for name in names):
        names = None
    if names is None:
        return dataset_categories(datasets, number) or unnamed_categories(number)
    found = dataset_categories((*datasets, _COCO), number, names=names)
    if ids is None:
        ids = (found or unnamed_categories(number)).ids
    return Categories(tuple(ids), tuple(names), found and found.colors)


def dataset_categories(
    datasets: Sequence[str], number: int, *, names: Sequence[str] | None = None, kind: str = "thing"
) -> Categories | None:
    """Those of the first of some datasets that has as many, from the catalog or its annotation file.

    Args:
        datasets: names in detectron2's catalog; unknown ones are passed over.
        number: of classes.
        names: that the dataset is to have, in this order; None for any.
        kind: detectron2's, ``"thing"`` or ``"stuff"``.
    """
    for dataset in datasets:
        if dataset not in MetadataCatalog.list():
            continue
        metadata = MetadataCatalog.get(dataset)
        found = _of_metadata(metadata, kind)
        if len(found.names) == number and names in (None, found.names):
            return found
    return None


def checked_ids(ids: object, names: Sequence[str] | None) -> tuple[int, ...] | None:
    """Ids as a file says them; None where they are no different whole numbers, one a class."""
    if names is None or not isinstance(ids, (list, tuple)) or not all(type(category_id) is int for category_id in ids):
        return None
    return tuple(ids) if len(set(ids)) == len(ids) == len(names) else None


def coco_categories(path: str | None) -> list[tuple[int, str]] | None:
    """Id and name of each category of a COCO file by id, as detectron2 numbers them; None if it does not tell."""
    try:
        facts = Path(path or "").stat()
        return _read_categories(str(path), facts.st_mtime_ns, facts.st_size)
    except (OSError, ValueError, KeyError, TypeError):
        return None


# Files of COCO's size take seconds.
@functools.lru_cache(maxsize=32)
def _read_categories(path: str, _changed: int, _size: int) -> list[tuple[int, str]]:
    categories = json.loads(Path(path).read_text(encoding="utf-8"))["categories"]
    return sorted((category["id"], str(category["name"])) for category in categories)


def _of_metadata(metadata: Metadata, kind: str) -> Categories:
    names = metadata.get(f"{kind}_classes")
    index_of = metadata.get(f"{kind}_dataset_id_to_contiguous_id")
    # detectron2 learns both with the first loading of a COCO file, not with its registration.
    if names and index_of:
        pairs = [(category_id, names[index]) for category_id, index in sorted(index_of.items(), key=lambda i: i[1])]
    elif kind == "stuff":
        pairs = list(enumerate(names or ()))
    else:
        pairs = coco_categories(metadata.get("json_file")) or list(enumerate(names or (), start=1))
    ids, found = zip(*pairs, strict=True) if pairs else ((), ())
    return Categories(tuple(ids), tuple(found), metadata.get(f"{kind}_colors"))
