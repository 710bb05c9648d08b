"""Load a trained detector and run it on images, folders and videos."""

import contextlib
import dataclasses
import numbers
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import PIL.Image
import pycocotools.mask as mask_util
import torch
from detectron2.data.catalog import Metadata
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances

from backbones import ConfigError
from backbones.errors import check_whole, counted, first_of
from projects_vil.checkpoint import find_model, find_weights
from projects_vil.config import SCORE_THRESHOLDS, Overrides, choose_device, combine_overrides, load_config
from projects_vil.data import Categories
from projects_vil.data.image_files import upright_pixels
from projects_vil.inference.hub import HubMixin
from projects_vil.inference.image_loading import ImageBatches, ImageSource, Loaded, Skipped, Video, read_ahead
from projects_vil.inference.runners import EagerRunner, ExportedRunner, Runner, encode_masks, to_host
from vil.choices import EXPORT_SUFFIXES, SCORE_THRESHOLD

LABEL_SIDE = 1000  # longer side in pixels above which labels grow with the image

ImageLike = str | os.PathLike | np.ndarray | PIL.Image.Image
T = TypeVar("T")


@dataclasses.dataclass(eq=False, repr=False)
class Detections:
    """The N detections of one image on the CPU, by descending score, in pixels of the upright image.

    Iteration yields objects of this class with one detection each.

    Attributes:
        instances: detectron2's Instances with ``pred_boxes``, ``scores``, ``pred_classes`` and, for Mask R-CNN,
            ``pred_masks``. :meth:`Detector.detect` sets ``encoded_masks`` instead of ``pred_masks``.
        categories: The classes. ``pred_classes`` are indices into them.
        source: The image, for drawings. A file is read again; an array is not copied.
        draw_threshold: The default score threshold of :meth:`draw`.
        encoded_masks: The masks as COCO's compressed RLE, see :attr:`rles`.
        track_ids: (N,) the ids of the tracks through a video, from 0; -1 for a detection without a track. None if
            objects are not tracked.
    """

    instances: Instances
    categories: Categories
    source: ImageSource
    draw_threshold: float = SCORE_THRESHOLD
    encoded_masks: list[Any] | None = None
    track_ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.instances)

    def __getitem__(self, index: int | slice | np.ndarray) -> "Detections":
        """Return some of the detections, as in ``detections[0]`` or ``detections[detections.scores > 0.5]``."""
        chosen: Any = np.arange(len(self))[index].reshape(-1)
        masks = None if self.encoded_masks is None else [self.encoded_masks[number] for number in chosen]
        track_ids = None if self.track_ids is None else self.track_ids[chosen]
        return dataclasses.replace(self, instances=self.instances[chosen], encoded_masks=masks, track_ids=track_ids)

    def __iter__(self) -> Iterator["Detections"]:
        """Yield each detection, by descending score."""
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in Counter(self.names).most_common())
        return f"<{counted(len(self), 'detection')}{': ' if counts else ''}{counts}>"

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
        """(N,) float32, in [0, 1]."""
        return self.instances.scores.numpy()

    @property
    def classes(self) -> np.ndarray:
        """(N,) int64: indices into ``categories.names`` and ``categories.ids``, from 0."""
        return self.instances.pred_classes.numpy()

    @property
    def names(self) -> list[str]:
        """The class name of each detection."""
        return [self.categories.names[index] for index in self.instances.pred_classes.tolist()]

    @property
    def masks(self) -> np.ndarray | None:
        """(N, height, width) bool; None for a detector without masks."""
        if self.encoded_masks is not None:
            return np.array(list(map(mask_util.decode, self.encoded_masks)), bool).reshape(-1, *self.image_size)
        return self.instances.pred_masks.numpy() if self.instances.has("pred_masks") else None

    @property
    def rles(self) -> list[dict] | None:
        """The N masks as COCO's compressed RLE: ``size`` (height, width) and ``counts`` (bytes); None without masks."""
        if self.encoded_masks is None and self.instances.has("pred_masks"):
            return encode_masks([self.instances.pred_masks])[0]
        return self.encoded_masks

    def draw(self, *, score_threshold: float | None = None, longer_side: int = 0) -> np.ndarray:
        """Return the image with boxes, masks and labels: (height, width, 3) uint8 RGB.

        Args:
            score_threshold: Lowest score of a drawn detection, in [0, 1]. By default the threshold of the call or of
                the detector, or 0.3 if neither has one.
            longer_side: Smaller images are enlarged to this many pixels, so that labels are legible.

        Raises:
            ConfigError: If the image file cannot be read again.

        Example:
            ``PIL.Image.fromarray(detector("photo.jpg").draw()).save("drawing.png")``
        """
        check_threshold(score_threshold)
        threshold = self.draw_threshold if score_threshold is None else score_threshold
        drawn = self[self.scores >= threshold]
        pairs = zip(drawn.to_coco(0), drawn.classes.tolist(), strict=True)
        results = [result | {"category_id": index} for result, index in pairs]
        pixels, _ = self.source.decode()
        side = max(pixels.shape[:2])
        scale, label_size = max(longer_side / side, 1), max(side / LABEL_SIDE, 1)
        # Imports Matplotlib, which most uses of a detector do not need.
        from projects_vil.visualization.drawing import draw_instances

        metadata = Metadata(thing_classes=self.categories.names, thing_colors=self.categories.colors)
        return draw_instances(pixels, results, metadata, scale=scale, label_size=label_size)

    def to_coco(self, image_id: int) -> list[dict]:
        """Return the detections in COCO's results format, with the category ids of the training dataset.

        Each detection is a dict with ``image_id``, ``category_id``, ``bbox`` (left, top, width, height), ``score`` and,
        for Mask R-CNN, ``segmentation`` (RLE). A tracked detection also has ``track_id``.
        """
        fields = {name: value for name, value in self.instances.get_fields().items() if name != "pred_masks"}
        results, rles = instances_to_coco_json(Instances(self.image_size, **fields), image_id), self.rles
        for position, result in enumerate(results):
            result["category_id"] = self.categories.ids[result["category_id"]]
            if rles is not None:
                result["segmentation"] = rles[position] | {"counts": rles[position]["counts"].decode()}
            if self.track_ids is not None and self.track_ids[position] >= 0:
                result["track_id"] = int(self.track_ids[position])
        return results

    def as_detectron2(self) -> dict[str, Instances]:
        """Return detectron2's output format, for example for ``supervision.Detections.from_detectron2``."""
        return {"instances": self.instances}


class Detector(HubMixin):
    """A trained detector for images in files and in memory.

    **Arrays are RGB**, (H, W, 3) uint8, as in PIL and Matplotlib. OpenCV images are BGR: pass ``array[..., ::-1]``. The
    detector converts to the channel order of its model.

    Images are resized to the test size of the config. Only images of the same padded size share a batch, so that
    detections do not depend on the batch size, up to floating-point rounding.

    Args:
        runner: The model. :meth:`load` creates it.
        categories: Ids and names of the classes. By default the categories of the runner.
        draw_threshold: The default score threshold of drawings.

    Example::

        detector = Detector.load("output/vil_tiny")
        detections = detector("photo.jpg")
        detections.boxes, detections.scores, detections.names
    """

    def __init__(
        self, runner: Runner, *, categories: Categories | None = None, draw_threshold: float | None = None
    ) -> None:
        if not hasattr(runner, "categories"):
            raise ConfigError(f"Detector takes a loaded model, not {runner!r}. Use Detector.load('output/mine').")
        self.runner = runner
        self.categories = categories or runner.categories
        self.draw_threshold = SCORE_THRESHOLD if draw_threshold is None else draw_threshold

    @classmethod
    def load(
        cls,
        source: str | os.PathLike,
        *,
        weights: str | os.PathLike | None = None,
        device: int | str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        score_threshold: float | None = None,
        tta: bool = False,
        overrides: Overrides = (),
    ) -> "Detector":
        """Load a detector.

        Args:
            source: One of the following:

                - a run of ``train``, its output directory or its ``config.yaml``, for the best checkpoint
                  (``TEST.BEST_METRIC``) or else the last one;
                - a folder written by :meth:`save_pretrained`;
                - another config with ``MODEL.WEIGHTS``;
                - a checkpoint with a ``config.yaml`` in its folder;
                - an exported file, or the name of an official detector (docs/model_zoo.md). These need no config.
            weights: Another checkpoint, or an exported file.
            device: ``"cpu"``, ``"cuda"`` or the number of a GPU. By default the GPU if there is one, but the CPU for
                exported files. On ``"cuda"``, ONNX files need onnxruntime-gpu, and other exported files do not run.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` for all layers but the last. By default
                ``INFERENCE.DTYPE``. An exported file has a fixed dtype.
            score_threshold: Lowest score of a detection, in [0, 1]. By default the threshold of the config or export.
            tta: Whether to use test-time augmentation.
            overrides: Config keys and values, as in ``{"INPUT.MIN_SIZE_TEST": 640}``.

        Raises:
            ConfigError: If a file is missing or damaged, or if files do not fit together.
        """
        source = Path(source).expanduser()
        check_threshold(score_threshold)
        device = None if device is None else str(device)
        given = combine_overrides(overrides, {"MODEL.WEIGHTS": weights, "MODEL.DEVICE": device})
        weights, device = given.get("MODEL.WEIGHTS"), given.get("MODEL.DEVICE")
        if weights and source.is_dir() and Path(weights) == source:
            weights = None  # the run's best or last checkpoint
        path = weights if weights and str(weights).endswith(EXPORT_SUFFIXES) else source
        if str(path).endswith(EXPORT_SUFFIXES):
            options = {"weights": bool(weights) and weights != path, "dtype": dtype, "tta": tta}
            options |= {key: key not in ("MODEL.WEIGHTS", "MODEL.DEVICE") for key in given}
            if unused := [name for name, is_given in options.items() if is_given]:
                advice = f"Leave it out, or export '{path}' again with other config keys."
                raise ConfigError(f"An exported model has no option {', '.join(unused)}. {advice}")
            runner = ExportedRunner(Path(path), device=device or "cpu", score_threshold=score_threshold)
            return cls(runner, draw_threshold=score_threshold)
        config, weights = find_model(source, weights)
        given.setdefault("MODEL.DEVICE", "cuda")
        if dtype is not None:
            given["INFERENCE.DTYPE"] = str(dtype).removeprefix("torch.")
        if score_threshold is not None:
            given |= dict.fromkeys(SCORE_THRESHOLDS, float(score_threshold))
        # Values may be NumPy numbers or paths.
        cfg = load_config(config, {key: str(value) for key, value in given.items()})
        cfg = choose_device(cfg, requested=device is not None)
        file = os.fspath(weights or cfg.MODEL.WEIGHTS)
        file = file if os.path.exists(file) else find_weights(file)
        return cls(EagerRunner(cfg, file, tta=tta), draw_threshold=score_threshold)

    def __repr__(self) -> str:
        runner = self.runner
        return (
            f"<{runner.architecture} with {runner.backbone} on {runner.device}, {counted(len(self.names), 'class')} "
            f"({first_of(self.names, 3)}), weights {runner.weights}, score threshold {runner.score_threshold:g}, "
            f"draw threshold {self.draw_threshold:g}>"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The class names."""
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
        """Detect objects in an image, or in each image of a list.

        Args:
            images: A file name, an array **(H, W, 3) uint8 RGB** or a PIL image, or a list or tuple of them.
            batch_size: Maximum number of images in a batch.
            score_threshold: Lowest score of a detection in this call, in [0, 1]. By default the detector's threshold.

        Returns:
            The detections of the image, or a list with the detections of each image.

        Raises:
            ConfigError: If an image has another type, cannot be read, or is too small or too large, or if
                ``score_threshold`` is below the detector's threshold.
        """
        check_whole("batch_size", batch_size)
        check_threshold(score_threshold)
        if score_threshold is not None and score_threshold < self.runner.score_threshold:
            text = f"score_threshold is {score_threshold:g}, below the detector's {self.runner.score_threshold:g}."
            raise ConfigError(f"{text} Load or export the detector with a lower threshold.")
        single = not isinstance(images, (list, tuple))
        listed: Sequence[Any] = [images] if single else images
        sources = []
        for index, image in enumerate(listed):
            name = "the image" if single else f"image {index + 1} of {len(listed)}"
            if isinstance(image, (str, os.PathLike)):
                name, image = str(image) if single else f"{name}, {image}", Path(image)
            elif isinstance(image, PIL.Image.Image):
                image = upright_pixels(image, "RGB", name=name)
            elif not isinstance(image, np.ndarray):
                kind = type(image).__name__
                raise ConfigError(f"{name} has type {kind}. Pass a file name, array (H, W, 3) uint8 RGB or PIL image.")
            elif image.dtype != np.uint8 or image.shape[2:] != (3,) or not image.size:
                raise ConfigError(f"{name} is an array {image.shape} {image.dtype}. Pass an array (H, W, 3) uint8 RGB.")
            sources.append(ImageSource(image, name, index))

        def select(item: Loaded | Skipped, detections: Detections | None) -> Detections:
            if isinstance(item, Skipped):
                raise ConfigError(f"Cannot use {item.name}: {item.reason}. Use another image.")
            assert detections is not None
            if score_threshold is None:
                return detections
            return dataclasses.replace(detections[detections.scores >= score_threshold], draw_threshold=score_threshold)

        results = list(self.detect(ImageBatches(sources), select, batch_size=batch_size, dense_masks=True))
        return results[0] if single else results

    def detect(
        self,
        source: ImageBatches | Video,
        convert: Callable[[Loaded | Skipped, Detections | None], T],
        *,
        batch_size: int = 1,
        dense_masks: bool = False,
    ) -> Iterator[T]:
        """Yield ``convert(image, detections)`` for each image of a source, in the order of the source.

        This is the prediction pipeline: load and preprocess in threads, group into batches, run the model. ``convert``
        is called as soon as a batch is finished, before its results are put in order.

        Args:
            source: Images or a video.
            convert: Turns the detections of an image into the format of a writer. For an image that cannot be used,
                the arguments are a :class:`Skipped` and None.
            batch_size: Maximum number of images in a batch.
            dense_masks: Whether instances have ``pred_masks``. Otherwise masks are encoded on the detector's device.
        """
        position, converted = 0, {}
        with (
            contextlib.closing(source.batches(self.runner, batch_size)) as batches,
            contextlib.closing(read_ahead(batches)) as batches_ahead,
        ):
            for batch in batches_ahead:
                images = [item for item in batch if isinstance(item, Loaded)]
                sizes = [(image.entry["height"], image.entry["width"]) for image in images]
                outputs = self.runner([image.image for image in images], sizes) if images else []
                results = zip(*to_host(outputs, dense_masks=dense_masks), strict=True)
                for item in batch:
                    detections = None
                    if isinstance(item, Loaded):
                        instances, masks = next(results)
                        detections = Detections(instances, self.categories, item.source, self.draw_threshold, masks)
                    converted[item.index] = convert(item, detections)
                    while position in converted:
                        yield converted.pop(position)
                        position += 1


def check_threshold(score_threshold: float | None) -> None:
    """Raise a :class:`ConfigError` unless a score threshold is None or a number in [0, 1]."""
    is_number = isinstance(score_threshold, numbers.Real)
    if score_threshold is not None and not (is_number and 0 <= score_threshold <= 1):
        raise ConfigError(f"score_threshold is {score_threshold!r}. Use a number between 0 and 1.")
