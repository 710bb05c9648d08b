"""Trained detectors for images in files and in memory, and their results."""

import contextlib
import dataclasses
import numbers
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import PIL.Image
import pycocotools.mask as mask_util
import torch
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances

from backbones import ConfigError
from backbones.errors import check_whole
from projects_vil.checkpoint import (
    LAST_CHECKPOINT,
    PUBLISHED_WEIGHTS,
    Categories,
    find_weights,
    is_zoo_name,
    weights_of,
    zoo_config,
)
from projects_vil.config import CONFIG_FILE, choose_device, first_of, load_config
from projects_vil.data import register_datasets
from projects_vil.export import is_exported
from projects_vil.inference.hub import HubMixin
from projects_vil.inference.image_loading import ImageBatches, ImageSource, Loaded, Runner, Skipped, Video, read_ahead
from projects_vil.inference.runners import EagerRunner, ExportedRunner, encode_masks, to_host
from projects_vil.visualization import DRAW_THRESHOLD, draw_instances

LABEL_SIDE = 1000  # longer side in pixels above which labels grow with the image

ImageLike = str | os.PathLike | np.ndarray | PIL.Image.Image


@dataclasses.dataclass(eq=False, repr=False)
class Detections:
    """The N objects in one image, by descending score, on the CPU, in pixels of the (upright) image.

    Attributes:
        instances: detectron2's, with ``pred_boxes``, ``scores``, ``pred_classes`` and, for Mask R-CNN, ``pred_masks``;
            those of :meth:`Detector.detect` have ``encoded_masks`` instead.
        categories: the classes that ``pred_classes`` are indices of.
        source: the image, to draw on. A file is read again, and an array is not copied.
        draw_threshold: the default score threshold of :meth:`draw`.
        encoded_masks: the masks as COCO's compressed RLE, see :attr:`rles`.
    """

    instances: Instances
    categories: Categories
    source: ImageSource
    draw_threshold: float = DRAW_THRESHOLD
    encoded_masks: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.instances)

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in Counter(self.names).most_common())
        return f"<{len(self)} detection{'' if len(self) == 1 else 's'}{': ' if counts else ''}{counts}>"

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the image."""
        return tuple(self.instances.image_size)

    @property
    def boxes(self) -> np.ndarray:
        """(N, 4) float32: left, top, right, bottom."""
        return self.instances.pred_boxes.tensor.numpy()

    @property
    def scores(self) -> np.ndarray:
        """(N,) float32, in 0..1."""
        return self.instances.scores.numpy()

    @property
    def classes(self) -> np.ndarray:
        """(N,) int64: indices into ``categories.names`` and ``categories.ids``, from 0."""
        return self.instances.pred_classes.numpy()

    @property
    def names(self) -> list[str]:
        """Class names of the N objects."""
        return [self.categories.names[index] for index in self.instances.pred_classes.tolist()]

    @property
    def masks(self) -> np.ndarray | None:
        """(N, height, width) bool; None for a detector without masks."""
        if self.encoded_masks is not None:
            return np.array(list(map(mask_util.decode, self.encoded_masks)), bool).reshape(-1, *self.image_size)
        return self.instances.pred_masks.numpy() if self.instances.has("pred_masks") else None

    @property
    def rles(self) -> list[dict] | None:
        """COCO's compressed RLE of the N masks, ``size`` (height, width) and ``counts`` (bytes); None without masks."""
        if self.encoded_masks is None and self.instances.has("pred_masks"):
            return encode_masks([self.instances.pred_masks])[0]
        return self.encoded_masks

    def draw(self, *, score_threshold: float | None = None, longer_side: int = 0) -> np.ndarray:
        """Return the image with boxes, masks and labels: (height, width, 3) uint8 RGB.

        Args:
            score_threshold: lowest score of a drawn detection, in [0, 1]; None for that of the call or the detector,
                or 0.3 if neither was given one.
            longer_side: pixels to which a smaller image is enlarged, so that labels are legible.

        Raises:
            ConfigError: if the image's file cannot be read again.
        """
        threshold = self.draw_threshold if score_threshold is None else score_threshold
        is_shown = self.instances.scores >= threshold
        shown = [result for result, shows in zip(self._results(0), is_shown, strict=True) if shows]
        pixels = self.source.read()
        longer, metadata = max(pixels.shape[:2]), self.categories.metadata
        scale, label_size = max(longer_side / longer, 1), max(longer / LABEL_SIDE, 1)
        return draw_instances(pixels, shown, metadata, scale=scale, label_size=label_size)

    def to_coco(self, image_id: int) -> list[dict]:
        """Return COCO's results format, with the category ids of the dataset that the detector was trained on.

        One dict per object: ``image_id``, ``category_id``, ``bbox`` (left, top, width, height), ``score`` and, for
        Mask R-CNN, ``segmentation`` (RLE).
        """
        ids = self.categories.ids
        return [result | {"category_id": ids[result["category_id"]]} for result in self._results(image_id)]

    def _results(self, image_id: int) -> list[dict]:
        """Return COCO's results with indices of classes as their ids."""
        fields = {name: value for name, value in self.instances.get_fields().items() if name != "pred_masks"}
        results = instances_to_coco_json(Instances(self.image_size, **fields), image_id)
        for result, rle in zip(results, self.rles or (), strict=False):
            result["segmentation"] = rle | {"counts": rle["counts"].decode()}
        return results

    def as_detectron2(self) -> dict[str, Instances]:
        """Return detectron2's output for the image, for ``supervision.Detections.from_detectron2`` and others."""
        return {"instances": self.instances}


class Detector(HubMixin):
    """A trained detector for images in files and in memory::

        detector = Detector.load("output/vil_tiny")
        found = detector("photo.jpg")
        found.boxes, found.scores, found.names

    **Arrays are RGB**, (H, W, 3) uint8, as in PIL and Matplotlib; OpenCV's are BGR: pass ``array[..., ::-1]``. The
    channel order of the model itself does not matter to the caller.

    Images are resized as for testing. Only images that the model pads to one size share a batch, so that every batch
    size gives the same detections, up to the rounding of floating-point sums.

    Args:
        runner: the model; :meth:`load` creates it.
        categories: other ids and names for its classes.
        draw_threshold: the default score threshold of drawings.

    Attributes:
        runner, categories: as above.
    """

    def __init__(
        self, runner: Runner, *, categories: Categories | None = None, draw_threshold: float | None = None
    ) -> None:
        self.runner = runner
        self.categories = categories or runner.categories
        self.draw_threshold = DRAW_THRESHOLD if draw_threshold is None else draw_threshold

    @classmethod
    def load(
        cls,
        source: str | os.PathLike,
        *,
        weights: str | os.PathLike | None = None,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        score_threshold: float | None = None,
        tta: bool = False,
        overrides: Sequence[object] = (),
    ) -> "Detector":
        """Load a detector.

        Args:
            source: a run's folder or its ``config.yaml``, for the last checkpoint of the run; a folder from
                :meth:`save_pretrained`; another config, with ``MODEL.WEIGHTS``; a checkpoint next to its
                ``config.yaml``; or an exported file or the name of an official detector (docs/model_zoo.md), which need
                no config.
            weights: another checkpoint, or an exported file.
            device: ``"cpu"`` or ``"cuda"``; None for the GPU if there is one. Exported files run on the CPU.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, in which all but the last layers compute; None for
                ``INFERENCE.DTYPE``. Exported files have their own.
            score_threshold: lowest score of a detection, in [0, 1]; None for that of the config or the export.
            tta: whether to use test-time augmentation.
            overrides: keys and values of the config, ``["INPUT.MIN_SIZE_TEST", 640]``.

        Raises:
            ConfigError: for files that are missing, damaged, or do not fit together.
        """
        source = Path(source).expanduser()
        if score_threshold is not None:
            check_threshold(score_threshold)
        given: dict[Any, Any] = dict(zip(overrides[::2], overrides[1::2], strict=False))
        weights, device = weights or given.get("MODEL.WEIGHTS"), device or given.get("MODEL.DEVICE")
        if weights and source.is_dir() and Path(weights) == source:
            weights = None  # the run's last checkpoint
        exported = next((Path(path) for path in (weights, source) if path and is_exported(Path(path))), None)
        if exported is not None:
            others = {"weights": Path(weights or exported) != exported, "device": str(device or "cpu") != "cpu"}
            named = [name for name, is_other in (others | {"tta": tta, "dtype": dtype}).items() if is_other]
            named += ["dtype"] * (dtype is not None) + [
                key for key in given if key not in ("MODEL.WEIGHTS", "MODEL.DEVICE")
            ]
            if named:
                fixed = f"an exported model on the CPU, which fixes {', '.join(named)}"
                raise ConfigError(f"{exported} is {fixed}: leave out what is named, or export again with other keys")
            return cls(ExportedRunner(exported, score_threshold=score_threshold), draw_threshold=score_threshold)
        config, weights = find_model(source, weights)
        cfg = load_config(config, [str(value) for value in overrides])
        cfg.defrost()
        cfg.MODEL.DEVICE = str(device or "cuda")
        cfg.INFERENCE.DTYPE = dtype or cfg.INFERENCE.DTYPE
        if score_threshold is not None:
            cfg.MODEL.RETINANET.SCORE_THRESH_TEST = cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = float(score_threshold)
        cfg = choose_device(cfg, requested=device is not None)
        # For colors, and for the classes of checkpoints without metadata.
        with contextlib.suppress(ConfigError):
            register_datasets(cfg)
        weights = find_weights(os.fspath(weights or cfg.MODEL.WEIGHTS))
        return cls(EagerRunner(cfg, weights, tta=tta), draw_threshold=score_threshold)

    def __repr__(self) -> str:
        runner, number = self.runner, len(self.names)
        return (
            f"<{runner.architecture} with {runner.backbone} on {runner.device}, {number} class{'es' * (number > 1)} "
            f"({first_of(self.names, 3)}), weights {runner.weights}, detections from a score of "
            f"{runner.score_threshold:g}, drawn from {self.draw_threshold:g}>"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Class names."""
        return self.categories.names

    @overload
    def __call__(
        self, images: ImageLike, *, batch_size: int = 1, score_threshold: float | None = None
    ) -> Detections: ...

    @overload
    def __call__(
        self, images: Sequence[ImageLike], *, batch_size: int = 1, score_threshold: float | None = None
    ) -> list[Detections]: ...

    def __call__(
        self, images: ImageLike | Sequence[ImageLike], *, batch_size: int = 1, score_threshold: float | None = None
    ) -> Detections | list[Detections]:
        """Detect objects in an image, or in each image of a list, in its order.

        Args:
            images: file names, arrays **(H, W, 3) uint8 RGB**, or PIL images: one, or a list or tuple of any.
            batch_size: maximum number of images at once.
            score_threshold: lowest score of a detection in this call, in [0, 1]; None for the detector's own.

        Raises:
            ConfigError: for the first image that has another type, cannot be read, or is too small or large; and for a
                threshold below the detector's own, under which it has no detections.
        """
        check_whole("batch_size", batch_size)
        if score_threshold is not None:
            check_threshold(score_threshold)
            if score_threshold < (lowest := self.runner.score_threshold):
                low = f"score_threshold is {score_threshold:g}, and the detector has no detections below {lowest:g}"
                raise ConfigError(f"{low}: load it with that score_threshold, or export it with a lower one")
        single = not isinstance(images, (list, tuple))
        listed = [images] if single else images
        names = ["the image"] if single else [f"image {index + 1} of {len(listed)}" for index in range(len(listed))]
        sources = [_image_source(*pair, index) for index, pair in enumerate(zip(listed, names, strict=True))]
        found = {}
        for batch in self.detect(ImageBatches(sources), batch_size=batch_size, dense_masks=True):
            for item, detections in batch:
                if isinstance(item, Skipped):
                    raise ConfigError(f"cannot read {item.name}: {item.reason}")
                assert detections is not None
                if score_threshold is not None:
                    kept = detections.instances[detections.instances.scores >= score_threshold]
                    detections = dataclasses.replace(detections, instances=kept, draw_threshold=score_threshold)
                found[item.index] = detections
        results = [found[index] for index in range(len(sources))]
        return results[0] if single else results

    def detect(
        self, source: ImageBatches | Video, *, batch_size: int = 1, dense_masks: bool = False
    ) -> Iterator[list[tuple[Loaded, Detections] | tuple[Skipped, None]]]:
        """Yield the detections of a source in batches, while the next ones are read; images of one padded size
        share a batch.

        Args:
            source: images or a video.
            batch_size: maximum number of images at once.
            dense_masks: whether instances have ``pred_masks``. Else masks are encoded on the detector's device.
        """
        with (
            contextlib.closing(source.batches(self.runner, batch_size)) as batches,
            contextlib.closing(read_ahead(batches)) as batches_ahead,
        ):
            for batch in batches_ahead:
                group = [item for item in batch if isinstance(item, Loaded)]
                sizes = [(loaded.entry["height"], loaded.entry["width"]) for loaded in group]
                outputs = self.runner([loaded.image for loaded in group], sizes) if group else []
                results = [
                    (loaded, Detections(instances, self.categories, loaded.source, self.draw_threshold, masks))
                    for loaded, instances, masks in zip(group, *to_host(outputs, dense=dense_masks), strict=True)
                ]
                yield results + [(item, None) for item in batch if isinstance(item, Skipped)]


def find_model(source: Path, weights: str | os.PathLike | None = None) -> tuple[Path, str | os.PathLike | None]:
    """Return the config and the weights of a detector.

    Args:
        source: as for :meth:`Detector.load`, except for exported files.
        weights: another checkpoint.

    Returns:
        The config's file, and the weights: those given, or the source's own; None for those of the config.

    Raises:
        ConfigError: where there is no config, or a run has no weights.
    """
    if is_zoo_name(source):
        return zoo_config(str(source)), weights or str(source)
    if not source.exists():
        hub = "; Detector.from_pretrained loads from the Hugging Face Hub" * (len(source.parts) == 2)
        takes = f"a run's folder, a checkpoint next to its {CONFIG_FILE}, a name of the model zoo, or an exported file"
        raise ConfigError(f"there is no file or folder {source}: name {takes}{hub}")
    if is_exported(source):
        raise ConfigError(f"{source} is an exported model, which only predicts: name the run that it was exported from")
    folder = source if source.is_dir() else source.parent
    if source.suffix in (".yaml", ".yml") and source.name != CONFIG_FILE:
        return source, weights
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"there is no {CONFIG_FILE} in {folder}: name a run's folder, or a config and weights")
    if source.is_file() and source.name != CONFIG_FILE:
        return folder / CONFIG_FILE, weights or source
    # MODEL.WEIGHTS of a run's config are the initial ones.
    is_run = source.is_dir() or any((folder / name).is_file() for name in (LAST_CHECKPOINT, PUBLISHED_WEIGHTS))
    weights = weights or (weights_of(folder) if is_run else None)
    if is_run and weights is None:
        raise ConfigError(f"{folder} has no weights: neither a checkpoint, model_*.pth, nor {PUBLISHED_WEIGHTS}")
    return folder / CONFIG_FILE, weights


def _image_source(image: object, name: str, index: int) -> ImageSource:
    if isinstance(image, (str, os.PathLike)):
        return ImageSource(Path(image), str(image) if name == "the image" else f"{name}, {image}", index)
    if isinstance(image, PIL.Image.Image):
        return ImageSource(image, name, index)
    if not isinstance(image, np.ndarray):
        raise ConfigError(f"{name} is a {type(image).__name__}, not a file name, an array (H, W, 3) or a PIL image")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise ConfigError(f"{name} is an array {image.shape} {image.dtype}, not (H, W, 3) uint8 RGB")
    return ImageSource(image, name, index)


def check_threshold(score_threshold: float) -> None:
    """Raise a :class:`ConfigError` unless a score threshold is a number in [0, 1]."""
    if not isinstance(score_threshold, numbers.Real) or not 0 <= score_threshold <= 1:
        raise ConfigError(f"score_threshold is {score_threshold!r}: it must be between 0 and 1")
