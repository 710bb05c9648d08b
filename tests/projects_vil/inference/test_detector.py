"""Detector: sources that it loads from, images that it takes, and its results."""

import json
import shutil

import numpy as np
import PIL.Image
import pytest
import torch
from detectron2.structures import Boxes, Instances

from backbones import ConfigError
from projects_vil import Detector
from projects_vil.checkpoint import Categories
from projects_vil.export import metadata_path
from projects_vil.inference import Detections
from projects_vil.inference.sources import ImageSource
from tests.projects_vil.helpers import CONFIGS, small_config, untrained_detector
from tests.projects_vil.inference.helpers import ANY, BrightHalfRunner, picture, save


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
    np.testing.assert_allclose(ours.boxes, theirs.boxes, atol=1e-2)
    np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-3)
    assert ours.names == theirs.names


def test_images_of_every_type_give_the_same(detector, photos):
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


def test_batches_of_one_resized_size():
    sizes = [(40, 60), (64, 50), (80, 120), (20, 30), (64, 50)]
    runner = BrightHalfRunner()
    images = [picture(*size, bright="left" if index % 2 else "right") for index, size in enumerate(sizes)]
    found = Detector(runner)(images, batch_size=3)
    assert sorted(map(len, runner.batches)) == [2, 3]
    assert [one.image_size for one in found] == sizes
    assert [one.names for one in found] == [["right"], ["left"], ["right"], ["left"], ["right"]]


def test_arrays_are_rgb_for_models_of_both_channel_orders():
    class FirstChannelRunner(BrightHalfRunner):
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
    detector = Detector(BrightHalfRunner())
    for image in (tmp_path / "rotated.jpg", PIL.Image.open(tmp_path / "rotated.jpg")):
        assert detector(image).image_size == (60, 40)
    grey = PIL.Image.fromarray(picture(40, 60, bright="right")[..., 0].astype(np.uint16) * 257)
    assert detector(grey).names == ["right"]


@pytest.mark.parametrize(
    "image, named",
    [
        (np.zeros((4, 6), np.uint8), r"\(4, 6\) uint8"),
        (np.zeros((4, 6, 3)), r"\(4, 6, 3\) float64"),
        (np.zeros((3, 4, 6), np.uint8), r"\(3, 4, 6\)"),
        (np.zeros((2, 4, 6, 3), np.uint8), r"\(2, 4, 6, 3\)"),
        (np.zeros((0, 6, 3), np.uint8), r"\(0, 6, 3\)"),
        (torch.zeros(3, 4, 6), "Tensor"),
        ([picture(4, 6), 7], "image 2 of 2 .* int"),
        ([picture(4, 6), "absent.jpg"], r"image 2 of 2, absent\.jpg"),
        (picture(1, 4000), "the image"),
        (PIL.Image.new("F", (6, 4)), "32 bits"),
    ],
)
def test_images_of_other_types(image, named):
    with pytest.raises(ConfigError, match=named) as caught:
        Detector(BrightHalfRunner())(image)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="batch_size"):
        Detector(BrightHalfRunner())(image, batch_size=0)


# Results


def masked(size: tuple[int, int] = (40, 61)) -> Detections:
    """Two objects with masks on a grey image."""
    instances = Instances(size, pred_boxes=Boxes([[5.0, 10.0, 25.0, 30.0], [30.0, 2.0, 55.0, 35.0]]))
    instances.scores, instances.pred_classes = torch.tensor([0.9, 0.4]), torch.tensor([1, 0])
    instances.pred_masks = torch.zeros(2, *size, dtype=torch.bool)
    instances.pred_masks[0, 10:30, 5:25] = instances.pred_masks[1, 2:35, 30:55] = True
    return Detections(instances, ANY, ImageSource(np.full((*size, 3), 128, np.uint8), "grey", 0))


def test_fields(detector, photos):
    found = detector(photos[0])
    number = len(found)
    assert number > 10 and repr(found).startswith(f"<{number} detections: ")
    assert (found.boxes.shape, found.boxes.dtype) == ((number, 4), np.float32)
    assert found.scores.shape == found.classes.shape == (number,) and (np.diff(found.scores) <= 0).all()
    height, width = found.image_size
    assert (found.boxes >= 0).all() and (found.boxes <= [width, height, width, height]).all()
    assert found.names == [detector.names[index] for index in found.classes] and found.masks is None
    assert detector.categories == Categories((1, 2, 3), ("circle", "square", "triangle"))
    output = found.as_detectron2()["instances"]
    assert output is found.instances and np.array_equal(output.pred_boxes.tensor.numpy(), found.boxes)
    assert repr(masked()) == "<2 detections: 1 right, 1 left>"


def test_coco_results_have_the_ids_of_the_dataset():
    found = masked()
    first, second = found.to_coco(5)
    assert (first["image_id"], first["category_id"], first["bbox"]) == (5, 7, [5, 10, 20, 20])
    assert second["category_id"] == 3 and second["segmentation"]["size"] == [40, 61]
    assert json.loads(json.dumps([first, second])) == [first, second]
    assert found.masks.shape == (2, 40, 61) and found.masks.dtype == bool and found.names == ["right", "left"]


@pytest.mark.parametrize("size", [(40, 61), (127, 333), (501, 77)])
def test_drawings(size):
    found = masked(size)
    drawn = found.draw()
    assert drawn.shape == (*size, 3) and drawn.dtype == np.uint8 and (found.source.image == 128).all()
    changed = (drawn != 128).any(axis=2)
    assert changed[25, 15] and not changed[32, 50]
    assert (found.draw(score_threshold=0.3) != 128).any(axis=2)[32, 50]
    assert max(found.draw(longer_side=600).shape) in (599, 600)


def test_a_drawing_reads_its_file_again(tmp_path):
    save(tmp_path / "a.png", picture(80, 120))
    found = Detector(BrightHalfRunner())(tmp_path / "a.png")
    assert found.draw().shape == (80, 120, 3)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ConfigError, match=r"a\.png"):
        found.draw()


def test_supervision_takes_the_results(detector, photos):
    supervision = pytest.importorskip("supervision", reason="supervision is not installed")
    for found in (detector(photos[0]), masked()):
        theirs = supervision.Detections.from_detectron2(found.as_detectron2())
        assert np.array_equal(theirs.xyxy, found.boxes) and np.array_equal(theirs.class_id, found.classes)
        assert (theirs.mask is None) == (found.masks is None)


# Sources


def test_every_source_gives_the_same(detector, trained_run, exported_run, photos, tmp_path):
    config, final = trained_run / "config.yaml", trained_run / "model_final.pth"
    expected = detector(photos[:2])
    for other in (
        Detector.load(str(final)),
        Detector.load(config, weights=final),
        Detector.load(trained_run, overrides=["MODEL.WEIGHTS", str(final)]),
        Detector.load(link(trained_run, tmp_path / "config_only", "config.yaml"), weights=final),
        Detector.load(exported_run / "one.ts"),
        Detector.load(exported_run / "batch.ts", device="cpu"),
    ):
        assert other.categories == detector.categories
        for ours, theirs in zip(other(photos[:2], batch_size=2), expected, strict=True):
            assert_equal(ours, theirs)


def test_weights_of_an_unfinished_run(trained_run, tmp_path):
    run = link(trained_run, tmp_path / "run", "config.yaml", "model_0000001.pth")
    shutil.copy(trained_run / "model_final.pth", run / "model_0000003.pth")
    assert Detector.load(run).runner.weights.name == "model_0000003.pth"
    for text, name in (("model_0000001.pth", "model_0000001.pth"), ("absent.pth", "model_0000003.pth")):
        (run / "last_checkpoint").write_text(text)
        assert Detector.load(run).runner.weights.name == name
    with pytest.raises(ConfigError, match=r"MODEL\.WEIGHTS"):
        Detector.load(run / "config.yaml")
    (run / "model_final.pth").symlink_to(trained_run / "model_final.pth")
    assert Detector.load(run).runner.weights.name == "model_final.pth"


def test_score_threshold(trained_run, exported_run, detector, photos):
    scores = detector(photos[0]).scores
    threshold = float(scores[len(scores) // 2])
    for source in (trained_run, exported_run / "one.ts"):
        found = Detector.load(source, score_threshold=threshold)(photos[0])
        assert 0 < len(found) < len(scores) and found.draw_threshold == threshold
        np.testing.assert_allclose(found.scores, scores[: len(found)], atol=1e-3)
    assert detector(photos[0]).draw_threshold == 0.5
    with pytest.raises(ConfigError, match="score_threshold"):
        Detector.load(exported_run / "one.ts", score_threshold=0)


def test_an_older_export_without_ids(exported_run, tmp_path):
    path = tmp_path / "model.ts"
    path.symlink_to(exported_run / "one.ts")
    metadata = json.loads(metadata_path(exported_run / "one.ts").read_text())
    del metadata["category_ids"]
    metadata_path(path).write_text(json.dumps(metadata))
    assert Detector.load(path).categories == Categories((1, 2, 3), ("circle", "square", "triangle"))


def test_masks_and_test_time_augmentation(tmp_path, photos):
    cfg = small_config("mask_rcnn", "TEST.AUG.MIN_SIZES", "(48, 64)", "TEST.DETECTIONS_PER_IMAGE", "5")
    torch.save({"model": untrained_detector(cfg).state_dict()}, tmp_path / "model_final.pth")
    (tmp_path / "config.yaml").write_text(cfg.dump())
    for tta in (False, True):
        found = Detector.load(tmp_path, tta=tta)(photos[0])
        assert found.masks.shape == (len(found), *found.image_size) and found.masks.any()
    assert found.draw(score_threshold=0).shape == (*found.image_size, 3)


@pytest.mark.parametrize(
    "source, options, named",
    [
        ("absent", {}, "absent"),
        ("empty", {}, r"config\.yaml"),
        ("config_only", {}, r"model_final\.pth"),
        ("weights.pth", {}, r"config\.yaml"),
        ("demo", {}, r"MODEL\.WEIGHTS"),
        ("run", {"weights": "absent.pth"}, r"absent\.pth"),
        ("run", {"score_threshold": 1.5}, "score_threshold"),
        ("run", {"score_threshold": "a"}, "score_threshold"),
        ("run", {"device": "tpu"}, r"MODEL\.DEVICE"),
        ("run", {"overrides": ["INPUT.MIN_SIZE_TST", 64]}, r"INPUT\.MIN_SIZE_TST"),
        ("run", {"overrides": ["INPUT.MIN_SIZE_TEST"]}, r"INPUT\.MIN_SIZE_TEST"),
        ("export", {"device": "cuda"}, "device"),
        ("export", {"weights": "absent.pth"}, "weights"),
        ("export", {"tta": True}, "tta"),
        ("without_metadata.ts", {}, r"without_metadata\.ts"),
    ],
)
def test_sources_without_a_detector(trained_run, exported_run, tmp_path, source, options, named):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.pth").write_text("")
    (tmp_path / "without_metadata.ts").write_text("")
    link(trained_run, tmp_path / "config_only", "config.yaml")
    sources = {"run": trained_run, "demo": CONFIGS["retinanet"], "export": exported_run / "one.ts"}
    with pytest.raises(ConfigError, match=named) as caught:
        Detector.load(sources.get(source, tmp_path / source), **options)
    assert "\n" not in str(caught.value)


def test_the_device_is_the_gpu_if_there_is_one(trained_run, monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Detector, "build", lambda cfg, weights, **options: devices.append(cfg.MODEL.DEVICE))
    Detector.load(trained_run)
    Detector.load(trained_run, device="cpu")
    Detector.load(trained_run, overrides=["MODEL.DEVICE", "cpu"])
    Detector.load(trained_run, overrides=["MODEL.DEVICE", "cpu"], device="cuda:0")
    assert devices == ["cuda", "cpu", "cpu", "cuda:0"]
