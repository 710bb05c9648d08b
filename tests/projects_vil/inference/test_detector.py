"""Detector: models to load, types of images, and results."""

import json

import numpy as np
import PIL.Image
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.structures import Boxes, Instances

from backbones import ConfigError
from projects_vil import Detector, Run
from projects_vil.data import Categories
from projects_vil.inference import Detections, runners
from projects_vil.inference.image_loading import ImageBatches, ImageSource
from tests.projects_vil.helpers import CONFIGS, assert_same_detections, message
from tests.projects_vil.inference.helpers import ANY, HalfRunner, picture, save, save_run
from tests.selection import slow_except
from vil.choices import SCORE_THRESHOLD


@pytest.fixture(scope="module")
def detector(trained_run):
    return Detector.load(trained_run)


@pytest.fixture(scope="module")
def photos(datasets_root):
    return sorted((datasets_root / "shapes/val").iterdir())


def link(run, folder, *names: str):
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(run / name)
    return folder


def assert_equal(ours: Detections, theirs: Detections) -> None:
    assert len(ours) == len(theirs) > 0 and ours.image_size == theirs.image_size
    assert sorted(ours.names) == sorted(theirs.names)
    assert_same_detections(ours.instances, theirs.instances)


@pytest.mark.parametrize("name", slow_except(["retinanet", "mask_rcnn"], ["retinanet"]))
@pytest.mark.parametrize("dtype", slow_except(["bfloat16", "float16"], ["bfloat16"]))
def test_networks_in_sixteen_bits(tmp_path, name, dtype):
    """Outputs are float32, and close to the outputs of a float32 model."""
    save_run(tmp_path, name, "TEST.DETECTIONS_PER_IMAGE", "5")
    image = np.random.default_rng(0).integers(0, 255, (50, 70, 3), np.uint8)
    expected = Detector.load(tmp_path)(image)
    for options in ({"dtype": getattr(torch, dtype)}, {"dtype": dtype}, {"overrides": ["INFERENCE.DTYPE", dtype]}):
        detector, dtypes = Detector.load(tmp_path, **options), set()
        for module in detector.runner.detector.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(lambda module, inputs, output, dtypes=dtypes: dtypes.add(output.dtype))
        found = detector(image)
        assert dtypes == {getattr(torch, dtype), torch.float32}
        assert {found.boxes.dtype, found.scores.dtype} == {np.dtype(np.float32)}
        np.testing.assert_allclose(found.scores[:3], expected.scores[:3], rtol=0.1)
    assert "INFERENCE.DTYPE" in message(Detector.load, tmp_path, dtype="int8")


def test_encoded_masks_equal_pycocotools(monkeypatch):
    """For images of different sizes with full, empty and noisy masks, and for any chunk size."""
    random = np.random.default_rng(0)
    images = [random.random(shape) < 0.5 for shape in ((5, 9, 13), (0, 8, 3), (4, 30, 7))]
    images[0][0], images[0][1], images[2][1, :, 2:5], images[2][2, 0, 0] = False, True, True, True
    expected = [[mask_util.encode(np.asfortranarray(mask.astype(np.uint8))) for mask in image] for image in images]
    for pixels in (1, 250, runners.MAX_MASK_PIXELS):
        monkeypatch.setattr(runners, "MAX_MASK_PIXELS", pixels)
        assert runners.encode_masks([torch.from_numpy(image) for image in images]) == expected


def test_encoded_and_dense_masks_are_the_same(tmp_path):
    save_run(tmp_path, "mask_rcnn", "TEST.DETECTIONS_PER_IMAGE", "7")
    detector, image = Detector.load(tmp_path), picture(50, 70)
    source = ImageBatches([ImageSource(image, "a", 1), ImageSource(image, "b", 2)])
    encoded, _ = detector.detect(source, lambda _, detections: detections)
    dense = detector(image)
    assert len(dense) == 7 and dense.instances.pred_masks.shape == (7, 50, 70)
    assert not encoded.instances.has("pred_masks") and np.array_equal(encoded.masks, dense.masks)
    assert encoded.rles == dense.rles and encoded.to_coco(3) == dense.to_coco(3)
    assert np.array_equal(encoded.draw(score_threshold=0), dense.draw(score_threshold=0))
    for found in (encoded, dense):
        assert [one.scores for one in found] == [[score] for score in dense.scores]
        assert np.array_equal(found[-1].masks, dense.masks[6:]) and len(found[found.scores > dense.scores[2]]) == 2
        with pytest.raises(IndexError):
            found[7]
    empty = detector(image, score_threshold=1)
    assert empty.masks.shape == (0, 50, 70) and empty.rles == []


# Images


def test_images_of_every_type_give_the_same_detections(detector, photos):
    expected = [detector(photo) for photo in photos]
    arrays = [np.asarray(PIL.Image.open(photo).convert("RGB")) for photo in photos]
    mirrored = np.ascontiguousarray(arrays[0][..., ::-1])[..., ::-1]
    for image in (str(photos[0]), PIL.Image.open(photos[0]), arrays[0], mirrored):
        assert_equal(detector(image), expected[0])
    for images, batch_size in ((photos, 3), ([arrays[0], *photos[1:]], 8), (tuple(arrays), 2)):
        for one, other in zip(detector(images, batch_size=batch_size), expected, strict=True):
            assert_equal(one, other)
    assert detector([]) == []
    opened = PIL.Image.open(photos[0])
    assert_equal(*detector([opened, opened], batch_size=2))


def test_augmented_detections_are_in_pixels_of_the_files(trained_run, photos):
    overrides = ["TEST.AUG.MIN_SIZES", "(64,)", "TEST.AUG.FLIP", "False"]
    found = (Detector.load(trained_run, overrides=overrides, tta=tta)(photos, batch_size=2) for tta in (True, False))
    for augmented, plain in zip(*found, strict=True):
        # Boxes that overlap after clipping to the image are merged.
        assert 0.8 * len(plain) < len(augmented) <= len(plain)
        ours, theirs = (np.c_[one.boxes, 10 * one.scores, 1e4 * one.classes] for one in (augmented, plain))
        assert np.abs(ours[:, None] - theirs).max(axis=2).min(axis=1).max() < 1e-2


def test_arrays_are_rgb_for_models_of_both_channel_orders():
    class FirstChannelRunner(HalfRunner):
        """Scores are the mean of the first input channel."""

        def _find(self, image, size):
            found = super()._find(image, size)
            found.scores = image[0].float().mean()[None] / 255
            return found

    rgb, bgr = FirstChannelRunner(), FirstChannelRunner()
    bgr.channels = "BGR"
    assert Detector(rgb)(picture(40, 60)).scores[0] == pytest.approx(100 / 255, abs=0.02)
    assert Detector(bgr)(picture(40, 60)).scores[0] == 0


def test_pil_images_are_taken_upright(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(picture(40, 60)).save(tmp_path / "rotated.jpg", exif=exif)
    detector = Detector(HalfRunner())
    for image in (tmp_path / "rotated.jpg", PIL.Image.open(tmp_path / "rotated.jpg")):
        assert detector(image).image_size == (60, 40)
    gray = PIL.Image.fromarray(picture(40, 60, bright="right")[..., 0].astype(np.uint16) * 257)
    assert detector(gray).names == ["right"]


@pytest.mark.parametrize(
    "image, named",
    [
        (np.zeros((4, 6, 3)), r"\(4, 6, 3\) float64"),
        (np.zeros((3, 4, 6), np.uint8), r"\(3, 4, 6\)"),
        (np.zeros((0, 6, 3), np.uint8), r"\(0, 6, 3\)"),
        ([picture(4, 6), torch.zeros(3, 4, 6)], "image 2 of 2 has type Tensor"),
        ([picture(4, 6), "absent.jpg"], r"image 2 of 2, absent\.jpg"),
        (picture(1, 4000), "the image"),
        (PIL.Image.new("F", (6, 4)), "32 bits"),
    ],
)
def test_images_of_other_types(image, named):
    for runner, size, text in ((HalfRunner(), 1, named), (HalfRunner(), 0, "batch_size"), (None, 1, "not None. Use")):
        with pytest.raises(ConfigError, match=text):
            Detector(runner)(image, batch_size=size)


# Results


@pytest.mark.parametrize("name", ["model_final.pth", pytest.param("model.ts", marks=pytest.mark.slow)])
def test_repr_and_the_score_threshold_of_a_call(request, trained_run, photos, name):
    folder = trained_run if name == "model_final.pth" else request.getfixturevalue("exported_run")
    detector, model = Detector.load(folder / name, device="cpu"), "RetinaNet with vil_tiny_1_1_3_1_rpb on cpu"
    for fact in (model, "3 classes (circle, square, triangle)", str(folder / name), "0.001", f"{SCORE_THRESHOLD}"):
        assert fact in repr(detector) and "\n" not in repr(detector)
    found = detector(photos[0])
    middle = float(found.scores[len(found) // 2])
    fewer = detector(photos[0], score_threshold=middle)
    assert 0 < len(fewer) < len(found) and (fewer.scores >= middle).all() and fewer.draw_threshold == middle
    assert len(detector(photos[0])) == len(found)
    for wrong in (1.5, 0.0005):
        assert f"score_threshold is {wrong:g}" in message(detector, photos[0], score_threshold=wrong)


def masked(size: tuple[int, int] = (40, 61)) -> Detections:
    """Two objects with masks on a gray image."""
    instances = Instances(size, pred_boxes=Boxes([[5.0, 10.0, 25.0, 30.0], [30.0, 2.0, 55.0, 35.0]]))
    instances.scores, instances.pred_classes = torch.tensor([0.9, 0.4]), torch.tensor([1, 0])
    instances.pred_masks = torch.zeros(2, *size, dtype=torch.bool)
    instances.pred_masks[0, 10:30, 5:25] = instances.pred_masks[1, 2:35, 30:55] = True
    return Detections(instances, ANY, ImageSource(np.full((*size, 3), 128, np.uint8), "gray", 0))


def test_fields_and_coco_results():
    found = masked()
    assert repr(found) == "<2 detections: 1 right, 1 left>" and found.image_size == (40, 61)
    assert found.boxes.dtype == np.float32 and found.boxes.tolist() == [[5, 10, 25, 30], [30, 2, 55, 35]]
    assert found.classes.tolist() == [1, 0] and found.names == ["right", "left"]
    assert found.scores.tolist() == pytest.approx([0.9, 0.4])
    assert found.masks.shape == (2, 40, 61) and found.masks.dtype == bool and found.masks[0].sum() == 400
    first, second = found.to_coco(5)
    assert (first["image_id"], first["category_id"], first["bbox"]) == (5, 7, [5, 10, 20, 20])
    assert second["category_id"] == 3 and second["segmentation"]["size"] == [40, 61]
    assert json.loads(json.dumps([first, second])) == [first, second]


def test_drawings(tmp_path):
    for size in ((40, 61), (501, 77)):
        found = masked(size)
        drawn = found.draw()
        assert drawn.shape == (*size, 3) and drawn.dtype == np.uint8 and (found.source.image == 128).all()
        changed = (drawn != 128).any(axis=2)
        assert changed[25, 15] and changed[32, 50]
        assert not (found.draw(score_threshold=0.41) != 128).any(axis=2)[32, 50]
        assert max(found.draw(longer_side=600).shape) in (599, 600)
        assert "score_threshold is 'a'" in message(found.draw, score_threshold="a")
    # The file is read again.
    save(tmp_path / "a.png", picture(80, 120))
    found = Detector(HalfRunner())(tmp_path / "a.png")
    assert found.draw().shape == (80, 120, 3)
    (tmp_path / "a.png").unlink()
    assert "a.png" in message(found.draw)


# Sources


def test_sources_of_a_run_give_the_same_detections(detector, trained_run, photos, tmp_path):
    final = trained_run / "model_final.pth"
    assert detector.categories == Categories((1, 2, 3), ("circle", "square", "triangle"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert detector.runner.cfg.MODEL.DEVICE == device and detector.runner.weights == final
    expected, overrides = detector(photos[0]), ["MODEL.WEIGHTS", final, "TEST.DETECTIONS_PER_IMAGE", np.int64(100)]
    for other in (
        Detector.load(str(final)),
        Detector.load(trained_run / "config.yaml", overrides={"MODEL.TRANSFORMER.ATTENTION_BACKEND": "sdpa"}),
        Detector.load(link(trained_run, tmp_path / "config_only", "config.yaml"), overrides=overrides, device="cpu"),
    ):
        assert other.categories == detector.categories
        assert_equal(other(photos[0]), expected)
    # An unfinished run has no model_final.pth.
    run = link(trained_run, tmp_path / "run", "config.yaml", "model_0000001.pth")
    assert Detector.load(Run(run)).runner.weights.name == "model_0000001.pth"


@pytest.mark.slow
def test_exports_give_the_same_detections(detector, exported_run, trained_run, photos):
    expected = detector(photos[:2])
    for other in (
        Detector.load(exported_run / "model.ts"),
        Detector.load(exported_run / "model_batched.ts", device="cpu"),
        Detector.load(trained_run / "config.yaml", overrides=["MODEL.WEIGHTS", str(exported_run / "model.ts")]),
    ):
        assert other.categories == detector.categories
        for ours, theirs in zip(other(photos[:2], batch_size=2), expected, strict=True):
            assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "source, options, named",
    [
        ("absent", {}, "absent"),
        ("empty", {}, r"config\.yaml"),
        ("config_only", {}, "weights"),
        ("weights.pth", {}, r"config\.yaml"),
        ("demo", {}, r"MODEL\.WEIGHTS"),
        ("segmentor", {}, "SemanticSegmentor"),
        ("run", {"weights": "absent.pth"}, r"absent\.pth"),
        ("run", {"score_threshold": 1.5}, "score_threshold"),
        ("run", {"device": "0,1"}, r"MODEL\.DEVICE is 0,1"),
        ("run", {"device": "cpu", "overrides": {"MODEL.DEVICE": 99}}, r"MODEL\.DEVICE is given twice"),
        ("run", {"overrides": {"MODEL.RETINANET.SCORE_THRESH_TEST": 2}}, "It must be 0 to 1"),
        ("model.ts", {"device": "cuda"}, "device"),
        ("model.ts", {"weights": "a", "tta": True, "overrides": ["INPUT.FORMAT", 1]}, "weights, tta, INPUT"),
        ("model.ts", {}, r"model\.ts"),
    ],
)
def test_sources_without_a_detector(trained_run, tmp_path, source, options, named):
    (tmp_path / "empty").mkdir()
    for name in ("weights.pth", "model.ts"):
        (tmp_path / name).touch()
    link(trained_run, tmp_path / "config_only", "config.yaml")
    sources = {"run": trained_run, "demo": CONFIGS["retinanet"], "segmentor": CONFIGS["semantic_fpn"]}
    with pytest.raises(ConfigError, match=named) as caught:
        Detector.load(sources.get(source, tmp_path / source), **options)
    assert "\n" not in str(caught.value)
