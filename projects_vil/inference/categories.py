"""The classes of results: their ids, names and colours."""

import dataclasses
from collections.abc import Sequence

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.catalog import Metadata

from projects_vil.checkpoint import coco_categories
from projects_vil.config import number_of_classes
from projects_vil.inference.runners import check_number_of_classes


@dataclasses.dataclass(frozen=True)
class Categories:
    """The classes of results, in the order of the model's.

    Attributes:
        ids: their ``category_id`` in the results.
        names: of the classes.
        colors: RGB in 0..255 of each in drawings, where a dataset says them.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    colors: Sequence[Sequence[int]] | None = None

    @property
    def metadata(self) -> Metadata:
        """For detectron2's drawings."""
        colors = {} if self.colors is None else {"thing_colors": self.colors}
        return Metadata(thing_classes=list(self.names), **colors)


def find_categories(cfg: CfgNode, classes: Sequence[str] | None, *, annotated: bool = False) -> Categories:
    """Those of the first of ``DATASETS.TEST`` that is known here and has the model's classes; or else ids from 1, with
    the names ``classes``, or numbers.

    Args:
        cfg: the detector's config.
        classes: that the model was trained on; None, or numbers, where their names are not known: then any dataset with
            as many will do.
        annotated: whether ``DATASETS.TEST`` was given for these images, so that only its number of classes counts.

    Raises:
        InputError: where the model has another number of classes than the config.
    """
    check_number_of_classes(cfg, classes)
    _, number = number_of_classes(cfg)
    any_names = annotated or classes is None or all(name.isdecimal() for name in classes)
    for name in cfg.DATASETS.TEST:
        if name not in DatasetCatalog.list():
            continue
        metadata = MetadataCatalog.get(name)
        names = metadata.get("thing_classes")
        index_of = metadata.get("thing_dataset_id_to_contiguous_id")
        # detectron2 learns both with the first loading of a COCO file, not with its registration.
        if names and index_of:
            pairs = [(category_id, names[index]) for category_id, index in sorted(index_of.items(), key=lambda i: i[1])]
        else:
            pairs = coco_categories(metadata.get("json_file")) or list(enumerate(names or (), start=1))
        if len(pairs) == number and (any_names or [name for _, name in pairs] == list(classes)):
            return Categories(*map(tuple, zip(*pairs, strict=True)), colors=metadata.get("thing_colors"))
    ids = range(1, number + 1)
    return Categories(tuple(ids), tuple(classes or (f"class {category_id}" for category_id in ids)))
