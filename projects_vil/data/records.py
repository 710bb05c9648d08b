"""Read the records of datasets, check them against the config, and share them between processes."""

import dataclasses
import itertools
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.build import print_instances_class_histogram
from detectron2.structures import BoxMode
from detectron2.utils import comm
from detectron2.utils.logger import log_first_n

from backbones import ConfigError
from backbones.errors import check_choice, counted, explained_errors
from backbones.files import atomic_write
from projects_vil.config import is_panoptic, is_segmentor
from projects_vil.data.catalog import add_stuff, categories_of, check_files, class_order, model_classes
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.image_files import IGNORED_LABEL, missing_files
from projects_vil.data.readers import read_coco
from projects_vil.data.segmentation import rle_of
from projects_vil.files import SharedRecords, paused_garbage_collection

CHECK_MODES = ("error", "warn", "off")
# The memory limit of a container, in versions 2 and 1 of Linux control groups
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# The metadata that detectron2 sets when it loads records.
_CLASS_KEYS = ("thing_classes", "thing_dataset_id_to_contiguous_id")


# Objects that are read once per run, by the result of _key
SHARED: dict[tuple, SharedRecords] = {}


def read_datasets(cfg: CfgNode, *, train: bool = True) -> int:
    """Read and check the datasets of a run in the first process of each machine, and share them with its processes.

    All processes call this function before the run writes files. :func:`load_dataset`, the loaders, the evaluators and
    the visualization then use the shared records. Each file is read and checked once per machine, and its records are
    in memory once per machine.

    Args:
        cfg: The config of the run.
        train: Whether to read ``DATASETS.TRAIN`` in addition to ``DATASETS.TEST``.

    Returns:
        The number of training images, which ``SOLVER.EPOCHS`` uses. 0 if ``train`` is False.

    Raises:
        ConfigError: In all processes, under the conditions of :func:`load_dataset`.
    """
    SHARED.clear()
    for name in cfg.DATASETS.TEST:
        read_records(cfg, [name], train=False)
    number = read_records(cfg, cfg.DATASETS.TRAIN, train=True) if train else 0
    # The classes of the model come from the training dataset, and they may change when it is read.
    for name in cfg.DATASETS.TEST:
        class_order(cfg, name)
    return number


def read_records(cfg: CfgNode, names: Sequence[str], *, train: bool) -> int:
    """Run :func:`load_dataset` in the first process of each machine, and share the records. All processes call this.

    Returns:
        The number of images.
    """

    def read() -> int:
        # An evaluation needs the annotations of COCO files, too.
        for name in () if train else names:
            ground_truth(name, check=cfg.DATASETS.CHECK, masks=cfg.MODEL.MASK_ON)
        SHARED[_records_key(cfg, names, train)] = records = load_dataset(cfg, names, train=train)
        return len(records)

    return read_and_share(read, names)


def read_and_share(read: Callable[[], Any], names: Sequence[str] = ()) -> Any:
    """Call ``read`` in the first process of each machine. The others get the objects that it adds to :data:`SHARED`.

    All processes call this function. The objects are written to a temporary file that all processes of the machine map.
    They are therefore in memory once per machine.

    Args:
        read: A function that adds objects to :data:`SHARED`.
        names: Datasets. The others get their classes, too, which detectron2 sets when it loads records.

    Returns:
        The return value of ``read``, in all processes.

    Raises:
        ConfigError: In all processes, if any ``read`` raises a ``ConfigError`` or an ``OSError``, or if machines have
            different return values.
    """
    if comm.get_world_size() == 1:
        return read()
    before, outcome, keys = set(SHARED), None, list(itertools.product(names, _CLASS_KEYS))
    with tempfile.TemporaryDirectory(prefix="records_") as folder:
        if comm.get_local_rank() == 0:
            try:
                value, files = read(), {}
                classes = [MetadataCatalog.get(name).get(key) for name, key in keys]
                for key in SHARED.keys() - before:
                    files[key] = os.path.join(folder, str(len(files)))
                    with atomic_write(files[key], sync=False) as partial, partial.open("wb") as file:
                        torch.save(SHARED[key], file)
                outcome = (value, classes), files, ""
            except (ConfigError, OSError) as error:
                outcome = None, {}, str(error)
        outcomes = comm.all_gather(outcome)
        content, files, _ = outcomes[comm.get_rank() - comm.get_local_rank()]
        for key, path in files.items():
            with torch.serialization.safe_globals([SharedRecords]):
                SHARED[key] = torch.load(path, mmap=True, weights_only=True)
        # The files are deleted after all processes have mapped them.
        comm.synchronize()
    # The error of a machine has priority over different return values.
    for other, _, message in sorted(filter(None, outcomes), key=lambda one: not one[2]):
        if message or other != content:
            raise ConfigError(message or "DATASETS.TRAIN or TEST differs between machines. Copy the same files to all.")
    value, classes = content
    for (name, key), known in zip(keys, classes, strict=True):
        if known is not None:
            setattr(MetadataCatalog.get(name), key, known)
    return value


@paused_garbage_collection()
def load_dataset(cfg: CfgNode, names: Sequence[str], *, train: bool) -> SharedRecords:
    """Return the records of datasets in detectron2's dataset format.

    COCO files are checked and fixed according to ``DATASETS.CHECK`` (:func:`fixed_coco`).
    Each process logs each finding once. Records that :func:`read_datasets` has read are not read again.

    Args:
        cfg: The config of the run.
        names: Names of registered datasets.
        train: Whether the records are for training. Training skips images without objects unless
            ``DATALOADER.FILTER_EMPTY_ANNOTATIONS`` is False.

    Raises:
        ConfigError: If a name is unknown, a file is missing, annotations cannot be read, the dataset check finds
            errors, the annotations do not fit the task or the classes of the model, or no image is left.
    """
    check_choice("DATASETS.CHECK", cfg.DATASETS.CHECK, CHECK_MODES)
    if not names:
        raise ConfigError(f"DATASETS.{'TRAIN' if train else 'TEST'} is empty. Name a dataset.")
    if (records := SHARED.get(_records_key(cfg, names, train))) is not None:
        return records
    for name in names:
        check_files(name)
    files = ", ".join(MetadataCatalog.get(name).get("json_file") or name for name in names)
    facts = _Facts()
    with explained_errors(files, "cannot be read", "Repair the file."):
        records = SharedRecords(_records(cfg, names, facts, train=train))
    if not records:
        raise ConfigError(f"'{files}' has no images{' with annotations' if train else ''}. Use another dataset.")
    _check_task(cfg, files, facts)
    is_checked = cfg.DATASETS.CHECK != "off" and all(map(is_coco, names))
    if not is_checked and (missing := missing_files(record["file_name"] for record in records)):
        raise ConfigError(f"{len(missing)} images of '{files}' are missing, such as '{missing[0]}'. Add them.")
    if train and not is_segmentor(cfg):
        _check_memory(cfg, *facts.largest)
        objects = [{"annotations": itertools.repeat({"category_id": n}, number)} for n, number in facts.classes.items()]
        if classes := list((model_classes(cfg)[1] or categories_of(names[0])).values()):
            print_instances_class_histogram(objects, classes)
    return records


@dataclasses.dataclass
class _Facts:
    """Facts about records that are collected while the records are read.

    Attributes:
        kinds: Whether records have annotations, label images and masks.
        classes: The number of objects of each class, without crowds.
        largest: The largest number of objects in an image, and the image file.
    """

    kinds: set[tuple[bool, bool, bool]] = dataclasses.field(default_factory=set)
    classes: Counter[int] = dataclasses.field(default_factory=Counter)
    largest: tuple[int, str] = (0, "")


def _records(cfg: CfgNode, names: Sequence[str], facts: _Facts, *, train: bool) -> Iterator[dict[str, Any]]:
    """Yield the records of :func:`load_dataset`, and collect facts about them."""
    skip_empty, num_removed = train and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS, 0
    for name in names:
        check, masks = cfg.DATASETS.CHECK, cfg.MODEL.MASK_ON
        if check == "off" or not is_coco(name):
            own = DatasetCatalog.get(name)
        else:
            images = SHARED.get(_key([name], check, masks)) or _by_image(name, check=check, masks=masks, areas=False)
            own = _coco_records(name, images, masks=masks)
        order = class_order(cfg, name)
        own = in_order(own, order) if train and order is not None else own
        for record in add_stuff(name, list(own)) if is_panoptic(cfg) else own:
            objects = record.get("annotations", ())
            classes = [one["category_id"] for one in objects if not one.get("iscrowd")]
            if skip_empty and "annotations" in record and not classes:
                num_removed += 1
                continue
            has_masks = any("segmentation" in one for one in objects)
            facts.kinds.add(("annotations" in record, "sem_seg_file_name" in record, has_masks))
            facts.classes.update(classes)
            facts.largest = max(facts.largest, (len(objects), str(record["file_name"])))
            yield record
    if num_removed:
        text = "Training skips %d images without objects. Add DATALOADER.FILTER_EMPTY_ANNOTATIONS False to use them."
        logging.getLogger(__name__).info(text, num_removed)


def _records_key(cfg: CfgNode, names: Sequence[str], train: bool) -> tuple:
    return _key(names, train, cfg.DATASETS.dump(), cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS, cfg.MODEL.dump())


def _key(names: Iterable[str], *facts: object) -> tuple:
    """Return the cache key of an object: the state of the datasets that it was read from, and the other facts.

    A COCO dataset that was registered again has no classes. It then has another state, so it is read again.
    """
    states = []
    for name in names:
        metadata = MetadataCatalog.get(name)
        path, root = metadata.get("json_file"), metadata.get("image_root")
        stat = os.stat(path) if path and os.path.exists(path) else None
        states.append((name, path, root, stat and (stat.st_size, stat.st_mtime_ns), bool(metadata.get(_CLASS_KEYS[0]))))
    return *states, *facts


def _check_task(cfg: CfgNode, files: str, facts: _Facts) -> None:
    """Raise a :class:`ConfigError` if the records lack the annotations that the model needs."""
    ignored = cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE
    if (is_segmentor(cfg) or is_panoptic(cfg)) and ignored != IGNORED_LABEL:
        raise ConfigError(f"MODEL.SEM_SEG_HEAD.IGNORE_VALUE is {ignored}. Set it to {IGNORED_LABEL}.")
    if is_segmentor(cfg):
        if not all(has_labels for _, has_labels, _ in facts.kinds):
            raise ConfigError(f"A SemanticSegmentor needs label images, but '{files}' has none. Use DATASETS.ADE20K.")
        return
    if (False, True, False) in facts.kinds:
        architecture = cfg.MODEL.META_ARCHITECTURE
        raise ConfigError(f"A {architecture} needs boxes, but '{files}' has none. Use DATASETS.COCO.")
    if cfg.MODEL.MASK_ON and facts.largest[0] and not any(has_masks for *_, has_masks in facts.kinds):
        raise ConfigError(f"MODEL.MASK_ON is True, but '{files}' has no masks. Set MODEL.MASK_ON False.")


def _check_memory(cfg: CfgNode, number: int, file: str) -> None:
    """Raise a :class:`ConfigError` if an image has too many objects for the memory.

    Without this check, the operating system would kill the run in the first iteration.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in filter(os.path.isfile, _MEMORY_LIMITS):
        limit = Path(path).read_text(encoding="utf-8").strip()
        memory = min(memory, int(limit)) if limit.isdigit() else memory
    # Mask R-CNN has one anchor for 4 pixels, and RetinaNet has fewer. If they do not fit on the GPU, detectron2 matches
    # them on the CPU. Its pairwise_iou needs 24 bytes per object and anchor.
    needed = 24 * number * max(cfg.INPUT.MIN_SIZE_TRAIN) * cfg.INPUT.MAX_SIZE_TRAIN // 4
    if needed > memory:
        sizes = f"about {needed / 1e9:.0f} GB, but there are {memory / 1e9:.0f} GB"
        advice = "Divide the image into tiles, or lower INPUT.MAX_SIZE_TRAIN."
        raise ConfigError(f"'{file}' has {number:,} objects. Training on it needs {sizes}. {advice}")


def in_order(records: Iterable[dict[str, Any]], order: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield records with the class indices of the model; ``order`` is the result of :func:`class_order`."""
    for record in records:
        objects = [one | {"category_id": order[one["category_id"]]} for one in record.get("annotations", ())]
        yield record | {"annotations": objects}


# -- COCO files ------------------------------------------------------------------------------------


def is_coco(name: str) -> bool:
    """Return whether a registered dataset is a COCO file of instances, with or without label images of stuff."""
    metadata = MetadataCatalog.get(name)
    types = ("coco", "coco_panoptic_seg") if metadata.get("sem_seg_root") else ("coco",)
    return metadata.get("evaluator_type") in types and bool(metadata.get("json_file"))


def _coco_records(name: str, images: Iterable[tuple], *, masks: bool) -> Iterator[dict[str, Any]]:
    """Yield images and their annotations as detectron2's records, equal to the result of its ``load_coco_json``."""
    metadata = MetadataCatalog.get(name)
    for image, annotations in images:
        objects = []
        for annotation in annotations or ():
            record = {key: annotation[key] for key in ("iscrowd", "bbox") if key in annotation}
            segmentation = annotation.get("segmentation")
            if masks and segmentation:
                is_rle = isinstance(segmentation, dict)
                record["segmentation"] = rle_of(segmentation, *segmentation["size"]) if is_rle else segmentation
            if keypoints := annotation.get("keypoints"):
                # COCO's keypoints are pixel indices. detectron2's keypoints are coordinates of pixel centers.
                record["keypoints"] = [n if index % 3 == 2 else n + 0.5 for index, n in enumerate(keypoints)]
            class_index = metadata.thing_dataset_id_to_contiguous_id[annotation["category_id"]]
            objects.append(record | {"bbox_mode": BoxMode.XYWH_ABS, "category_id": class_index})
        file_name = os.path.join(metadata.image_root, image["file_name"])
        size = {"height": image["height"], "width": image["width"]}
        yield {"file_name": file_name, **size, "image_id": image["id"], "annotations": objects}


def _by_image(name: str, **options: Any) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]] | None]]:
    """Return the images of :func:`fixed_coco`, and set the classes in the metadata, as ``load_coco_json`` does.

    Images are sorted by id, and have a list of their annotations in the order of the file. Without a list of
    annotations in the file, they have None.
    """
    dataset, metadata = fixed_coco(name, **options), MetadataCatalog.get(name)
    categories = sorted(dataset["categories"], key=lambda category: category["id"])
    metadata.thing_classes = [category["name"] for category in categories]
    metadata.thing_dataset_id_to_contiguous_id = {category["id"]: i for i, category in enumerate(categories)}
    log_first_n(logging.INFO, f"{name}: {counted(len(dataset['images']), 'image')}", name=__name__, key="message")
    images, annotations = dataset["images"], dataset.get("annotations", [])
    ids = [image["id"] for image in images]
    by_id = sorted(range(len(ids)), key=ids.__getitem__)
    positions = {ids[index]: position for position, index in enumerate(by_id)}
    of_image = np.fromiter((positions.get(one["image_id"], -1) for one in annotations), np.int32, len(annotations))
    order = np.argsort(of_image, kind="stable")
    starts = np.searchsorted(of_image, np.arange(len(ids) + 1), sorter=order)
    if "annotations" not in dataset:
        return ((images[index], None) for index in by_id)
    spans = zip(by_id, starts, starts[1:], strict=False)
    return ((images[index], [annotations[n] for n in order[start:end].tolist()]) for index, start, end in spans)


@paused_garbage_collection()
def fixed_coco(name: str, *, check: str, masks: bool, areas: bool = True) -> dict[str, Any]:
    """Read, check and fix a registered COCO file.

    detectron2's records, the ground truth of the evaluation, the visualization and the report all use the returned
    annotations. Each process logs each finding once.

    Args:
        name: The name of a dataset for which :func:`is_coco` is true.
        check: The value of ``DATASETS.CHECK``. ``"error"`` raises if the check finds errors. ``"warn"`` removes the
            entries with errors. ``"off"`` returns the content of the file without a check.
        masks: Whether to check segmentations.
        areas: Whether to compute missing areas. Only evaluation needs them.

    Returns:
        The content of a COCO file.

    Raises:
        ConfigError: If the check finds errors, and under the conditions of :func:`read_coco`.
    """
    metadata = MetadataCatalog.get(name)
    path = metadata.json_file
    dataset = read_coco(path)
    if check == "off":
        return dataset
    file = CocoFile(path, metadata.image_root, masks=masks, dataset=dataset)
    findings = file.findings()
    if file.findings("error") and (check == "error" or file.unfixable() is not None):
        raise file.error(metadata.get("source"))
    for finding in findings:
        level = logging.INFO if finding.severity == "note" else logging.WARNING
        log_first_n(level, f"{file.path}: {file.describe(finding)}: {finding.effect}", name=__name__, key="message")
    return file.fixed(areas=areas)[0] if findings else dataset


@paused_garbage_collection()
def ground_truth(name: str, *, check: str, masks: bool) -> SharedRecords | None:
    """Return the images of :func:`fixed_coco` with their annotations for an evaluation, sorted by id.

    They are read once. :func:`read_and_share` shares them with the other processes.

    Args:
        name: A registered dataset.
        check: The value of ``DATASETS.CHECK``.
        masks: Whether the detector has masks.

    Returns:
        Pairs of an image and the list of its annotations, or None if the dataset has no COCO file.

    Raises:
        ConfigError: If the check rejects the annotations.
    """
    if not is_coco(name):
        return None
    if (truth := SHARED.get(_key([name], check, masks))) is None:
        with explained_errors(MetadataCatalog.get(name).json_file, "cannot be read", "Repair the file."):
            truth = SharedRecords(_by_image(name, check=check, masks=masks, areas=True))
        SHARED[_key([name], check, masks)] = truth
    return truth
