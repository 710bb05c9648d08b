"""A detector from wherever it was saved, on images of every kind: the same answers, or one clear line."""

import json
import shutil

import numpy as np
import PIL.Image
import pytest
import torch
from detectron2.structures import Boxes, Instances

from backbones import InputError
from projects_vil import Detector, load_config
from projects_vil.checkpoint import Categories
from projects_vil.export.metadata import metadata_path
from projects_vil.inference.detections import Detections
from projects_vil.inference.sources import ImageArray
from tests.projects_vil.helpers import CONFIGS, lively_detector, small_config
from tests.projects_vil.inference.helpers import ANY, HalfFinder, picture, save


@pytest.fixture(scope="module")
def detector(trained_run):
    return Detector.load(trained_run)


@pytest.fixture(scope="module")
def photos(datasets_root):
    return sorted((datasets_root / "shapes/val").iterdir())


def link(run, folder, *names: str):
    """A folder with some files of a run."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(run / name)
    return folder


def assert_equal(ours: Detections, theirs: Detections) -> None:
    assert len(ours) == len(theirs) > 0 and ours.image_size == theirs.image_size
    np.testing.assert_allclose(ours.boxes, theirs.boxes, atol=1e-2)
    np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-4)
    assert ours.names == theirs.names


# -- what it takes ---------------------------------------------------------------------------------


def test_every_kind_of_image_gives_the_same(detector, photos):
    expected = detector(str(photos[0]))
    pixels = np.asarray(PIL.Image.open(photos[0]).convert("RGB"))
    mirrored = np.ascontiguousarray(pixels[..., ::-1])[..., ::-1]
    for image in (photos[0], PIL.Image.open(photos[0]), pixels, mirrored):
        assert_equal(detector(image), expected)
    assert expected.image_size == pixels.shape[:2]


def test_a_list_is_answered_in_its_order(detector, photos):
    expected = [detector(photo) for photo in photos]
    arrays = [np.asarray(PIL.Image.open(photo).convert("RGB")) for photo in photos]
    for images, batch_size in ((photos, 3), ([arrays[0], *photos[1:]], 8), (tuple(arrays), 2)):
        found = detector(images, batch_size=batch_size)
        assert len(found) == len(photos)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    assert detector([]) == []
    opened = PIL.Image.open(photos[0])
    first, second = detector([opened, opened], batch_size=2)
    assert_equal(first, second)


def test_only_images_of_one_resized_size_share_a_batch():
    sizes = [(40, 60), (64, 50), (80, 120), (20, 30), (64, 50)]
    runner = HalfFinder()
    images = [picture(*size, bright="left" if place % 2 else "right") for place, size in enumerate(sizes)]
    found = Detector(runner)(images, batch_size=3)
    assert sorted(map(len, runner.batches)) == [2, 3]
    assert [one.image_size for one in found] == sizes
    assert [one.names for one in found] == [["right"], ["left"], ["right"], ["left"], ["right"]]


def test_arrays_are_rgb_whatever_the_model_takes():
    class Reddest(HalfFinder):
        """Scores are the mean of the first channel that it is given."""

        def _find(self, image, size):
            found = super()._find(image, size)
            found.scores = image[0].float().mean()[None] / 255
            return found

    rgb, bgr = Reddest(), Reddest()
    bgr.channels = "BGR"
    assert Detector(rgb)(picture(40, 60)).scores[0] == pytest.approx(100 / 255, abs=0.02)
    assert Detector(bgr)(picture(40, 60)).scores[0] == 0


def test_pillow_images_are_taken_upright(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(picture(40, 60)).save(tmp_path / "turned.jpg", exif=exif)
    detector = Detector(HalfFinder())
    for image in (tmp_path / "turned.jpg", PIL.Image.open(tmp_path / "turned.jpg")):
        assert detector(image).image_size == (60, 40)
    grey = PIL.Image.fromarray(picture(40, 60, bright="right")[..., 0].astype(np.uint16) * 257)
    assert detector(grey).names == ["right"]


@pytest.mark.parametrize(
    "image, expected",
    [
        (np.zeros((4, 6), np.uint8), r"the image is an array \(4, 6\) uint8, and \(H, W, 3\) uint8 RGB is needed"),
        (np.zeros((4, 6, 3)), r"array \(4, 6, 3\) float64"),
        (np.zeros((4, 6, 4), np.uint8), r"array \(4, 6, 4\) uint8"),
        (np.zeros((3, 4, 6), np.uint8), "channels come last"),
        (np.zeros((2, 4, 6, 3), np.uint8), "pass several as a list"),
        (np.zeros((0, 6, 3), np.uint8), r"array \(0, 6, 3\)"),
        (torch.zeros(3, 4, 6), "the image is of type Tensor, and a file name, .* is needed: tensor.permute"),
        (None, "the image is of type NoneType"),
        ([picture(4, 6), 7], "image 2 of 2 is of type int"),
        ([picture(4, 6), [picture(4, 6)]], "image 2 of 2 is of type list"),
        ("absent.jpg", "cannot take absent.jpg: No such file or directory"),
        ([picture(4, 6), "absent.jpg"], "cannot take image 2 of 2, absent.jpg: No such file"),
        (picture(1, 4000), "cannot take the image: nothing would be left of it"),
        (PIL.Image.new("F", (6, 4)), "cannot take the image: its channel has 32 bits"),
    ],
)
def test_images_that_are_none(image, expected):
    with pytest.raises(InputError, match=expected) as caught:
        Detector(HalfFinder())(image)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="batch_size is 0"):
        Detector(HalfFinder())(image, batch_size=0)


# -- what it gives ---------------------------------------------------------------------------------


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
    assert isinstance(found.instances, Instances) and len(found.instances) == number


@pytest.mark.parametrize("number, text", [(0, "<0 detections>"), (1, "<1 detection: 1 b>"), (2, "<2 detections: 2 b>")])
def test_as_text(number, text):
    instances = Instances((4, 6), scores=torch.ones(number), pred_classes=torch.ones(number, dtype=torch.int64))
    categories = Categories((1, 2), ("a", "b"))
    assert repr(Detections(instances, categories, ImageArray(np.zeros((4, 6, 3), np.uint8), "grey", 0))) == text


def masked(size: tuple[int, int] = (40, 61)) -> Detections:
    """Two objects with masks, found by hand on a grey image."""
    instances = Instances(size, pred_boxes=Boxes([[5.0, 10.0, 25.0, 30.0], [30.0, 2.0, 55.0, 35.0]]))
    instances.scores, instances.pred_classes = torch.tensor([0.9, 0.4]), torch.tensor([1, 0])
    instances.pred_masks = torch.zeros(2, *size, dtype=torch.bool)
    instances.pred_masks[0, 10:30, 5:25] = instances.pred_masks[1, 2:35, 30:55] = True
    return Detections(instances, ANY, ImageArray(np.full((*size, 3), 128, np.uint8), "grey", 0))


def test_coco_results_have_the_ids_of_the_dataset():
    first, second = masked().to_coco(5)
    assert (first["image_id"], first["category_id"], first["bbox"]) == (5, 7, [5, 10, 20, 20])
    assert second["category_id"] == 3 and second["segmentation"]["size"] == [40, 61]
    assert json.loads(json.dumps([first, second])) == [first, second]
    found = masked()
    assert found.masks.shape == (2, 40, 61) and found.masks.dtype == bool and found.names == ["right", "left"]


@pytest.mark.parametrize("size", [(40, 61), (127, 333), (501, 77)])
def test_a_drawing_is_as_large_as_its_image(size):
    found = masked(size)
    drawn = found.draw()
    assert drawn.shape == (*size, 3) and drawn.dtype == np.uint8
    assert (found.source.pixels == 128).all()
    changed = (drawn != 128).any(axis=2)
    assert changed[25, 15] and not changed[32, 50]
    assert (found.draw(score_threshold=0.3) != 128).any(axis=2)[32, 50]
    assert max(found.draw(longer_side=600).shape) in (599, 600)


def test_a_file_is_read_again_to_be_drawn(tmp_path):
    save(tmp_path / "a.png", picture(80, 120))
    found = Detector(HalfFinder())(tmp_path / "a.png")
    assert found.draw().shape == (80, 120, 3)
    (tmp_path / "a.png").unlink()
    with pytest.raises(InputError, match="cannot read the image .*a.png: No such file"):
        found.draw()


def test_what_supervision_reads(detector, photos):
    found = detector(photos[0])
    output = found.as_detectron2()["instances"]
    assert np.array_equal(output.pred_boxes.tensor.cpu().numpy(), found.boxes)
    assert np.array_equal(output.scores.cpu().numpy(), found.scores)
    assert np.array_equal(output.pred_classes.cpu().numpy().astype(int), found.classes)
    assert not hasattr(output, "pred_masks")
    assert masked().as_detectron2()["instances"].pred_masks.cpu().numpy().shape == (2, 40, 61)


def test_supervision_takes_the_results(detector, photos):
    supervision = pytest.importorskip("supervision", reason="supervision is not installed")
    for found in (detector(photos[0]), masked()):
        theirs = supervision.Detections.from_detectron2(found.as_detectron2())
        assert np.array_equal(theirs.xyxy, found.boxes) and np.array_equal(theirs.class_id, found.classes)
        assert np.array_equal(theirs.confidence, found.scores)
        assert (theirs.mask is None) == (found.masks is None)


# -- where it comes from ---------------------------------------------------------------------------


def test_every_place_gives_the_same(detector, trained_run, exported_run, photos, tmp_path):
    config, final = trained_run / "config.yaml", trained_run / "model_final.pth"
    expected = detector(photos[:2])
    loaded = [
        Detector.load(str(final)),
        Detector.load(config, weights=final),
        Detector.load(config, overrides=["MODEL.WEIGHTS", final]),
        Detector.load(trained_run, overrides=["MODEL.WEIGHTS", str(final)]),
        Detector.load(link(trained_run, tmp_path / "config_only", "config.yaml"), weights=final),
        Detector.load(exported_run / "one.ts"),
        Detector.load(exported_run / "batch.ts", device="cpu"),
    ]
    for other in loaded:
        assert other.categories == detector.categories
        for ours, theirs in zip(other(photos[:2], batch_size=2), expected, strict=True):
            assert_equal(ours, theirs)


def test_weights_of_a_run_that_is_not_done(trained_run, tmp_path):
    unfinished = link(trained_run, tmp_path / "run", "config.yaml", "model_0000001.pth")
    shutil.copy(trained_run / "model_final.pth", unfinished / "model_0000003.pth")
    assert weights_of(unfinished).name == "model_0000003.pth"
    for text, name in (("model_0000001.pth", "model_0000001.pth"), ("absent.pth", "model_0000003.pth"), ("", None)):
        (unfinished / "last_checkpoint").write_text(text)
        assert weights_of(unfinished).name == (name or "model_0000003.pth")
    Detector.load(unfinished)
    (unfinished / "model_final.pth").symlink_to(trained_run / "model_final.pth")
    assert weights_of(unfinished).name == "model_final.pth"


def weights_of(run):
    from projects_vil.inference.detector import _find_model

    return _find_model(run, None)[1]


def test_score_threshold(trained_run, exported_run, detector, photos, tmp_path):
    scores = detector(photos[0]).scores
    threshold = float(scores[len(scores) // 2])
    for source in (trained_run, exported_run / "one.ts"):
        found = Detector.load(source, score_threshold=threshold)(photos[0])
        assert 0 < len(found) < len(scores)
        np.testing.assert_allclose(found.scores, scores[: len(found)], atol=1e-4)
        assert found.drawn_from == threshold
    assert detector(photos[0]).drawn_from == 0.5
    with pytest.raises(InputError, match="score_threshold is 0, and .*one.ts was exported with 0.001: "):
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
    torch.save({"model": lively_detector(cfg).state_dict()}, tmp_path / "model_final.pth")
    (tmp_path / "config.yaml").write_text(cfg.dump())
    for tta in (False, True):
        found = Detector.load(tmp_path, tta=tta)(photos[0])
        assert found.masks.shape == (len(found), *found.image_size) and found.masks.any()
    assert found.draw(score_threshold=0).shape == (*found.image_size, 3)


@pytest.fixture
def places(trained_run, exported_run, tmp_path):
    """Folders and files to load from, by name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.pth").write_text("")
    (tmp_path / "holds_export").mkdir()
    (tmp_path / "holds_export/model.ts").write_text("")
    found = {name: tmp_path / name for name in ("absent", "empty", "weights.pth", "holds_export")}
    found["config_only"] = link(trained_run, tmp_path / "config_only", "config.yaml")
    found |= {"run": trained_run, "config": trained_run / "config.yaml", "demo": CONFIGS["retinanet"]}
    return found | {"export": exported_run / "one.ts"}


@pytest.mark.parametrize(
    "place, options, expected",
    [
        ("absent", {}, "there is no file or folder .*absent"),
        ("empty", {}, "empty has no config.yaml: it is no folder of a run$"),
        ("holds_export", {}, "no folder of a run; it holds .*model.ts, which can be loaded by itself"),
        ("config_only", {}, "config_only has no weights: neither model_final.pth nor another checkpoint, model_"),
        ("weights.pth", {}, "there is no config.yaml beside .*weights.pth: load a config, with weights="),
        ("config", {}, "MODEL.WEIGHTS of .*config.yaml are those that its run began with: load the folder"),
        ("demo", {}, "no weights were given"),
        ("run", {"weights": "absent.pth"}, "there is no weights file absent.pth"),
        ("run", {"score_threshold": 1.5}, "score_threshold is 1.5: it is 0 to 1"),
        ("run", {"score_threshold": "a"}, "score_threshold is 'a': it is 0 to 1"),
        ("run", {"device": "tpu"}, "MODEL.DEVICE is 'tpu': it is cpu or cuda"),
        ("run", {"overrides": ["INPUT.MIN_SIZE_TST", 64]}, "unknown config key INPUT.MIN_SIZE_TST; did you mean"),
        ("run", {"overrides": ["INPUT.MIN_SIZE_TEST"]}, "'INPUT.MIN_SIZE_TEST' has no value"),
        ("export", {"device": "cuda"}, "one.ts is an exported model, which runs on the CPU here, not on cuda"),
        ("export", {"weights": "absent.pth"}, "takes neither weights nor overrides nor tta"),
        ("export", {"tta": True}, "takes neither weights nor overrides nor tta"),
        ("holds_export/model.ts", {}, "cannot read .*model.ts.metadata.json"),
    ],
)
def test_places_that_hold_no_detector(places, place, options, expected):
    first, _, rest = place.partition("/")
    with pytest.raises(InputError, match=expected) as caught:
        Detector.load(places[first] / rest if rest else places[first], **options)
    assert "\n" not in str(caught.value)


def test_the_device_is_the_gpu_where_there_is_one(trained_run, monkeypatch):
    cfg = load_config(trained_run / "config.yaml")
    assert cfg.MODEL.DEVICE == "cpu"
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Detector, "build", lambda cfg, weights, **options: asked.append(cfg.MODEL.DEVICE))
    Detector.load(trained_run)
    Detector.load(trained_run, device="cpu")
    Detector.load(trained_run, overrides=["MODEL.DEVICE", "cpu"])
    Detector.load(trained_run, overrides=["MODEL.DEVICE", "cpu"], device="cuda:0")
    assert asked == ["cuda", "cpu", "cpu", "cuda:0"]
