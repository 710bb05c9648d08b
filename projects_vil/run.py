"""Training in one call, on COCO or on any dataset: what the command ``vil train`` does."""

import argparse
import contextlib
import dataclasses
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from backbones import ConfigError, list_variants
from backbones.errors import check_choice, closest
from projects_vil.checkpoint import checkpoints_of, read_zoo
from projects_vil.config import CONFIG_FILE, config_path, detector_name, load_config, number_of_classes
from projects_vil.data import SOURCE, Dataset, read_dataset
from projects_vil.engine import check_output_dir, distributed_env, train_from_command_line
from projects_vil.evaluation import EVALUATION_FILE, evaluate_predictions
from projects_vil.inference import Detector, find_model
from projects_vil.utils import cleanup_on_failure, read_json, run_lock

# A detector's folder in configs/, and the keys in which it differs.
DETECTORS: dict[str, tuple[str, dict[str, str]]] = {
    "retinanet": ("retinanet", {}),
    "mask_rcnn": ("mask_rcnn", {}),
    "faster_rcnn": ("mask_rcnn", {"MODEL.MASK_ON": "False"}),
}
DATA_FOLDER = "data"
# On COCO the schedules count iterations.
DEFAULT_EPOCHS = 50
# Names of datasets that were made here.
_registered: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        folder: its OUTPUT_DIR.
    """

    folder: Path

    def detector(self, **options: Any) -> Detector:
        """Return the detector of the last checkpoint; ``options`` are those of :meth:`Detector.load`."""
        return Detector.load(self.folder, **options)

    @property
    def results(self) -> dict[str, Any]:
        """The last evaluation, dataset -> task -> metric in percent; empty where there was none."""
        path = self.folder / EVALUATION_FILE
        return read_json(path) if path.is_file() else {}


def train(
    data: str | Path | None = None,
    *,
    model: str | None = None,
    detector: str | None = None,
    config: str | Path | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    val: float | None = None,
    weights: str | Path | None = None,
    output: str | Path | None = None,
    device: str | None = None,
    resume: bool = False,
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    dist_timeout: float = 600,
    **overrides: object,
) -> Run:
    """Train a detector and return its run; what is None is as the config has it, or the default named here.

    Args:
        data: a folder or a file in the format of COCO, YOLO, Pascal VOC, LabelMe or CVAT; None for the datasets of the
            config. Other formats are written in COCO's into ``OUTPUT_DIR/data``.
        model: a variant, or ``"timm:"`` and a name of timm's (default ``"vil_tiny"``).
        detector: ``"retinanet"`` (the default), ``"mask_rcnn"`` or ``"faster_rcnn"``.
        config: instead of ``model`` and ``detector`` a config, as a file or by name, ``"mask_rcnn/vil_small_rpb_1x"``.
        epochs: passes over the training images; 50 for ``data``.
        batch: images in an iteration; the learning rate is scaled to it, unless it is an override. By default the
            config's, with gradient accumulation if the memory requires it.
        val: share of the images for validation, where ``data`` has no validation images of its own.
        weights: a checkpoint, or a name of the model zoo; random weights by default.
        output: OUTPUT_DIR, by default ``output/DATA_MODEL_DETECTOR``.
        device: ``"cpu"`` or ``"cuda"``; by default the GPU if there is one.
        resume: continue the interrupted run in ``output``, with the schedule and the images of its beginning.
        num_gpus: processes on this machine, as for detectron2's ``launch``. They do not import your script. If it
            registers datasets or models of its own, start it with ``torchrun`` instead.
        num_machines: as for detectron2's ``launch``.
        machine_rank: as for detectron2's ``launch``.
        dist_url: as for detectron2's ``launch``.
        dist_timeout: seconds to wait for the other machines at the start.
        overrides: config keys, as ``**{"SOLVER.BASE_LR": 5e-5}``.

    Raises:
        ConfigError: for a mistake in the arguments, the data or a file.
    """
    given = _given(train, overrides)
    path, keys, name = _choose_config(model, detector, config)
    cfg, recipe = load_config(path, _words(keys | given)), load_config(path).SOLVER
    for key, value in (
        ("OUTPUT_DIR", output),
        ("SOLVER.EPOCHS", epochs),
        ("SOLVER.IMS_PER_BATCH", batch),
        ("MODEL.WEIGHTS", weights),
        ("MODEL.DEVICE", device),
    ):
        if value is None:
            continue
        if key in given:
            raise ConfigError(f"{key} is given twice, {value} and {given[key]}: leave one out")
        given[key] = str(value)
    output = Path(given.pop("OUTPUT_DIR", f"output/{_name(data) + '_' if data else ''}{name}")).expanduser()
    # In quotes, since a name may be a number.
    keys["OUTPUT_DIR"] = repr(str(output))
    if "SOLVER.IMS_PER_BATCH" not in given and "SOLVER.GRADIENT_ACCUMULATION_STEPS" not in given:
        keys["SOLVER.GRADIENT_ACCUMULATION_STEPS"] = "auto"
    if "SOLVER.IMS_PER_BATCH" in given and "SOLVER.BASE_LR" not in given:
        keys["SOLVER.REFERENCE_BATCH_SIZE"] = str(recipe.IMS_PER_BATCH)
    if data is not None and not {"SOLVER.EPOCHS", "SOLVER.MAX_ITER"} & given.keys():
        keys["SOLVER.EPOCHS"] = str(DEFAULT_EPOCHS)
    # More are slower, and torch warns.
    workers = min(cfg.DATALOADER.NUM_WORKERS, os.cpu_count() or 1)
    keys["DATALOADER.NUM_WORKERS"] = str(workers)
    if {"SOLVER.EPOCHS", "SOLVER.MAX_ITER"} <= given.keys():
        raise ConfigError("epochs (SOLVER.EPOCHS) and SOLVER.MAX_ITER both set the length of training. Leave one out.")
    if data is not None and _holds_data(output, Path(data)):
        raise ConfigError(f"--output '{output}' has files of the dataset. Choose another output directory.")
    # Before anything is written there.
    begun = load_config(path, _words(keys | given))
    if resume and checkpoints_of(output) and (output / CONFIG_FILE).exists():
        # With the data, schedule and classes of its beginning.
        path, keys = output / CONFIG_FILE, {"OUTPUT_DIR": keys["OUTPUT_DIR"]}
        if model or detector or config:
            _check_same_model(begun, load_config(path), output)
        if data is not None:
            _check_same_data(data, val, load_config(path), output)
        data, begun = None, load_config(path, _words(keys | given))
    check_output_dir(begun, resume=resume)
    with cleanup_on_failure(output):
        if data is not None:
            with _lock(output, machine_rank):
                check_output_dir(begun, resume=resume)
                dataset = read_dataset(data, output / DATA_FOLDER, val=val)
            print(dataset.line(), flush=True)
            if cfg.MODEL.MASK_ON and not dataset.has_masks:
                raise ConfigError(f"{data} has no masks, which Mask R-CNN needs: choose faster_rcnn or retinanet")
            keys |= _dataset_keys(*_register(dataset, output.name))
            keys[number_of_classes(cfg)[0]] = str(len(dataset.classes))
        if not (given.get("MODEL.WEIGHTS") or cfg.MODEL.WEIGHTS or resume):
            _suggest_weights(cfg.MODEL.TRANSFORMER.VARIANT)
        processes = {"num_gpus": num_gpus, "num_machines": num_machines, "machine_rank": machine_rank}
        processes |= {"dist_url": dist_url, "dist_timeout": dist_timeout, "resume": resume}
        _launch(path, keys | given, eval_only=False, **processes)
    return Run(output)


def evaluate(
    model: str | Path | None,
    data: str | Path | None = None,
    *,
    predictions: Sequence[str | Path] = (),
    output: str | Path | None = None,
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    dist_timeout: float = 600,
    **overrides: object,
) -> dict[str, Any]:
    """Evaluate a detector, and return dataset -> task -> metric in percent, as in its ``evaluation.json``.

    Args:
        model: a run's folder, a name of the model zoo, or a checkpoint next to its ``config.yaml``; None with
            ``predictions``.
        data: its test images, or else those for validation, or else all; None for DATASETS.TEST of the run, or COCO's.
        predictions: Parquet files of ``vil predict``, and folders of them, to evaluate instead of a model.
        output: folder of the results: by default that of the run, or ``output`` without one, and for ``data`` a folder
            ``evaluation_DATA`` in it.
        num_gpus, num_machines, machine_rank, dist_url: as for detectron2's ``launch``.
        dist_timeout: seconds to wait for the other machines at the start.
        overrides: config keys.

    Raises:
        ConfigError: for a mistake in the arguments, the data or a file.
    """
    given = _given(evaluate, overrides)
    if predictions:
        path, weights, root = config_path("base/retinanet_1x"), None, Path("output")
    else:
        path, weights = find_model(Path(model or ""), given.get("MODEL.WEIGHTS"))
        root = folder_of(path)
    keys = {} if weights is None else {"MODEL.WEIGHTS": str(weights)}
    own = root / (f"evaluation_{_name(data)}" if data else "")
    folder = Path(output or given.get("OUTPUT_DIR") or own).expanduser()
    keys["OUTPUT_DIR"] = repr(str(folder))
    processes = {"num_gpus": num_gpus, "num_machines": num_machines, "machine_rank": machine_rank}
    processes |= {"dist_url": dist_url, "dist_timeout": dist_timeout}
    with cleanup_on_failure(folder):
        if data is not None:
            dataset = read_dataset(data, folder / DATA_FOLDER, val=0)
            test = next(split for split in ("test", "val", "train") if split in dataset.splits)
            images = "all images, also those that the detector may have learned" if test == "train" else f"split {test}"
            print(f"{dataset.line()}; evaluated: {images}", flush=True)
            entries, names = _register(dataset, folder.name, test=test)
            cfg = load_config(path)
            if not predictions and len(dataset.classes) != number_of_classes(cfg)[1]:
                # The classes are matched by name to the dataset that the detector was trained on.
                entries += [list(entry) for entry in cfg.DATASETS.COCO if entry[0] in cfg.DATASETS.TRAIN]
                names["DATASETS.TRAIN"] = cfg.DATASETS.TRAIN
            keys |= _dataset_keys(entries, names)
        if predictions:
            evaluate_predictions(load_config(path, _words(keys | given)), predictions)
        else:
            _launch(path, keys | given, eval_only=True, resume=False, **processes)
    return Run(folder).results


def folder_of(config: Path) -> Path:
    """Return the folder for results of a detector: that of its run, or one in ``output`` for another config."""
    return config.parent if config.name == CONFIG_FILE else Path("output", config.stem)


def _given(function: Callable, overrides: Mapping[str, object]) -> dict[str, str]:
    """Return config keys and their values as words.

    Raises:
        ConfigError: for a keyword that is no config key.
    """
    unknown = next((key for key in overrides if not key.isupper()), None)
    if unknown is not None:
        hint = closest(unknown, set(inspect.signature(function).parameters) - {"overrides"})
        raise ConfigError(f"{function.__name__}() has no keyword {unknown!r}{hint}; keys of the config are in capitals")
    return {key: str(value) for key, value in overrides.items()}


def _holds_data(output: Path, data: Path) -> bool:
    """Return whether an output directory is a dataset, or a folder in it that no run wrote."""
    output, data = output.resolve(), data.resolve()
    is_used = output.is_dir() and any(output.iterdir()) and not (output / "log.txt").exists()
    return output == data or (is_used and data.is_dir() and output.is_relative_to(data))


def _lock(output: Path, machine_rank: int) -> contextlib.AbstractContextManager:
    """Lock the output directory in the first process of a run; the others write the same data."""
    env = distributed_env()
    is_first = machine_rank == 0 if env is None else env.rank == 0
    return run_lock(output) if is_first else contextlib.nullcontext()


def _check_same_model(cfg: CfgNode, begun: CfgNode, output: Path) -> None:
    """Raise a ConfigError if a config has another model than the run that is resumed."""
    model, own = (f"{part.MODEL.TRANSFORMER.VARIANT} with {detector_name(part)}" for part in (cfg, begun))
    if model != own:
        raise ConfigError(
            f"The run in '{output}' trains {own}, not {model}. Leave --model, --detector and --config out to resume "
            "it, or choose another output directory."
        )


def _check_same_data(data: str | Path, val: float | None, begun: CfgNode, output: Path) -> None:
    """Raise a ConfigError if a dataset is not, or no longer, the one that the run in ``output`` began with."""
    entries = {name: (Path(file), root) for name, file, root in begun.DATASETS.COCO}
    names = [*begun.DATASETS.TRAIN, *begun.DATASETS.TEST]
    contents: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        splits = read_dataset(data, folder, val=val, contents=contents).splits
    used = [split for split in ("train", "val") if split in splits]

    def is_same(name: str, split: str) -> bool:
        (old_file, old_root), (file, root) = entries[name], splits[split]
        same_file = os.path.realpath(file) == os.path.realpath(old_file)
        same_root = os.path.realpath(root) == os.path.realpath(old_root)
        return same_root and (same_file or _records(contents[split]) == _records(read_json(old_file)))

    has_same_splits = len(used) == len(names) and entries.keys() >= set(names)
    if has_same_splits and all(is_same(name, split) for name, split in zip(names, used, strict=True)):
        return
    source = names[0]
    if source in entries:
        file, info = entries[source][0], read_json(entries[source][0]).get("info")
        # A file that was written here names the dataset that it was made from.
        source = info.get(SOURCE, str(file)) if isinstance(info, dict) else str(file)
    changed = "(or --val) has changed since the start of the run in"
    differs = changed if source == os.path.abspath(data) else f"is not '{source}', the dataset of the run in"
    raise ConfigError(
        f"'{data}' {differs} '{output}'. Omit DATA to resume the run with its original images, or choose another "
        "output directory."
    )


def _records(content: Mapping[str, Any]) -> list[Any]:
    return [content.get(key) for key in ("images", "annotations", "categories")]


def _launch(path: Path, keys: Mapping[str, str], **arguments: object) -> None:
    train_from_command_line(argparse.Namespace(config_file=str(path), opts=_words(keys), **arguments))


def _choose_config(
    model: str | None, detector: str | None, config: str | Path | None
) -> tuple[Path, dict[str, str], str]:
    """Return a config, the keys in which the model or detector differs from it, and a name for the run's folder."""
    if config is not None:
        if model is not None or detector is not None:
            raise ConfigError("config names the model and the detector already: leave out model and detector")
        path = Path(config) if Path(config).is_file() else config_path(str(config))
        return path, {}, path.stem
    model, detector = model or "vil_tiny", detector or "retinanet"
    check_choice("detector", detector, DETECTORS)
    (folder, keys), name = DETECTORS[detector], f"{model}_{detector}".replace(":", "_")
    named = {"MODEL.TRANSFORMER.VARIANT": model} if model in list_variants() else {}
    # The recipe is the same with and without relative bias, and for the tables of segmentation.
    for variant in (model, f"{model}_rpb", model.removesuffix("_seg")):
        with contextlib.suppress(ConfigError):
            return config_path(f"{folder}/{variant}_1x"), keys | named, name
    # A variant, or a model of timm's, that has no config of its own.
    return config_path(f"base/{folder}_1x"), keys | {"MODEL.TRANSFORMER.VARIANT": model}, name


def _suggest_weights(variant: str) -> None:
    """Print how a run that starts from random weights could start from others."""
    names = [name for name, entry in read_zoo().items() if entry.variant == variant]
    if names:
        few = "for which a few hundred photos are seldom enough"
        print(f"training starts from random weights, {few}: start with --weights {' or '.join(names[:2])}", flush=True)


def _register(dataset: Dataset, name: str, *, test: str = "val") -> tuple[list[list[str]], dict[str, tuple[str, ...]]]:
    """Return the entries of ``DATASETS.COCO`` for a dataset, and the names to train on and to evaluate on.

    Their names are free afterwards: another run of this process may have had them for other files.
    """
    for split in dataset.splits:
        if f"{name}_{split}" in _registered & set(DatasetCatalog.list()):
            DatasetCatalog.remove(f"{name}_{split}")
            MetadataCatalog.remove(f"{name}_{split}")
        _registered.add(f"{name}_{split}")
    entries = [[f"{name}_{split}", *map(os.path.abspath, files)] for split, files in dataset.splits.items()]
    tested = (f"{name}_{test}",) if test in dataset.splits else ()
    return entries, {"DATASETS.TRAIN": (f"{name}_train",), "DATASETS.TEST": tested}


def _dataset_keys(entries: list[list[str]], names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {"DATASETS.COCO": repr(entries), **{key: repr(value) for key, value in names.items()}}


def _name(data: str | Path) -> str:
    """Return the name of a dataset: that of its folder, and of a COCO or CVAT file in it."""
    path = Path(data).resolve()
    if path.is_dir():
        return path.name
    folder = path.parents[path.parent.name == "annotations"].name
    return f"{folder}_{path.stem}" if path.suffix in (".json", ".xml") else folder


def _words(keys: Mapping[str, str]) -> list[str]:
    return [word for pair in keys.items() for word in pair]
