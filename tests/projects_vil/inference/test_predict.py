"""Files to results: the answers of an evaluation, in any batch, whatever the files are, and nothing half written."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances
from PIL import Image

from backbones import InputError
from projects_vil import load_config
from projects_vil.data import size_for_testing
from projects_vil.engine import Trainer
from projects_vil.export import export_detector
from projects_vil.export.metadata import metadata_path
from projects_vil.inference import predict
from projects_vil.inference.categories import Categories, find_categories
from projects_vil.inference.drawings import ImageDrawings, VideoDrawings
from projects_vil.inference.predict import run
from projects_vil.inference.sources import ImageFile, ImageFiles, Video, find_images, read_ahead
from projects_vil.inference.writers import JsonList
from tests.projects_vil.export.test_formats import write
from tests.projects_vil.helpers import lively_detector, run_tool, small_config

ANY = Categories((3, 7), ("left", "right"))
EIGHTY = ("MODEL.RETINANET.NUM_CLASSES", "80")


class HalfFinder:
    """A :class:`Runner` that finds the brighter half of each image, with its brightness for a score."""

    channels = "RGB"
    classes = None

    def __init__(self, *, stop_after: int | None = None) -> None:
        self.batches = []
        self.stop_after = stop_after

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        return size_for_testing(small_config(), height, width)

    def refusal(self, height: int, width: int) -> str | None:
        return "nothing would be left of it" if min(self.input_size(height, width)) < 1 else None

    def __call__(self, images, sizes):
        if len(self.batches) == self.stop_after:
            raise KeyboardInterrupt
        assert len({image.shape for image in images}) == 1 and all(image.dtype == torch.uint8 for image in images)
        self.batches.append([image.shape[1:] for image in images])
        return [self._find(image, size) for image, size in zip(images, sizes, strict=True)]

    def _find(self, image, size) -> Instances:
        halves = image.float().chunk(2, dim=2)
        brighter = int(halves[1].mean() > halves[0].mean())
        left, right = (size[1] / 2, size[1]) if brighter else (0, size[1] / 2)
        found = Instances(size, pred_boxes=Boxes([[left, 0, right, size[0]]]))
        found.scores = halves[brighter].mean()[None] / 255
        found.pred_classes = torch.tensor([brighter])
        return found


def picture(height: int, width: int, *, bright: str = "left") -> np.ndarray:
    pixels = np.zeros((height, width, 3), np.uint8)
    half = slice(0, width // 2) if bright == "left" else slice(width // 2, None)
    pixels[:, half] = 200, 100, 0
    return pixels


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def read(folder: Path) -> tuple[list[dict], dict]:
    return json.loads((folder / "results.json").read_text()), json.loads((folder / "images.json").read_text())


def run_on(source: Path, output: Path, *, runner=None, draw: bool = False, **options):
    output.mkdir(exist_ok=True)
    images = find_images(source, leave_out=output)
    drawer = ImageDrawings(output / "drawings", [image.name for image in images]) if draw else None
    return run(ImageFiles(images, threads=2), runner or HalfFinder(), ANY, output, drawer, **options)


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    """Equal results, in the same order, up to the rounding of sums; masks may differ in a pixel of their edge."""
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert (one["image_id"], one["category_id"]) == (other["image_id"], other["category_id"])
        assert one["bbox"] == pytest.approx(other["bbox"], abs=1e-2)
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
        assert ("segmentation" in one) == ("segmentation" in other)
    if "segmentation" in ours[0]:
        equal = sum(one["segmentation"] == other["segmentation"] for one, other in zip(ours, theirs, strict=True))
        assert equal >= 0.9 * len(ours)


# -- the same answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3])
def test_results_equal_those_of_an_evaluation(trained_run, shapes, tmp_path, batch_size):
    cfg = load_config(trained_run / "config.yaml")
    annotations = shapes / "annotations/instances_val.json"
    options = {"annotations": annotations, "batch_size": batch_size, "drawings": False}
    summary = predict(cfg, trained_run / "model_final.pth", shapes / "val", tmp_path / "out", **options)
    results, images = read(tmp_path / "out")
    assert_same(results, json.loads((trained_run / "inference/coco_instances_results.json").read_text()))
    truth = json.loads(annotations.read_text())
    assert [image["id"] for image in images["images"]] == [image["id"] for image in truth["images"]]
    assert [(c["id"], c["name"]) for c in images["categories"]] == [(c["id"], c["name"]) for c in truth["categories"]]
    assert (summary.done, summary.detections, summary.skipped) == (8, len(results), ())


def test_masks_equal_those_of_an_evaluation_in_every_batch(shapes, tmp_path):
    options = ["OUTPUT_DIR", str(tmp_path / "evaluated"), "INPUT.FORMAT", "BGR", "TEST.DETECTIONS_PER_IMAGE", "10"]
    cfg = small_config("mask_rcnn", *options)
    detector = lively_detector(cfg)
    torch.save({"model": detector.state_dict()}, tmp_path / "weights.pth")
    Path(cfg.OUTPUT_DIR).mkdir()
    Trainer.test(cfg, detector)
    expected = json.loads((tmp_path / "evaluated/inference/coco_instances_results.json").read_text())
    assert all("segmentation" in result for result in expected)
    for batch_size in (1, 5):
        output = tmp_path / f"batches_of_{batch_size}"
        options = {"annotations": shapes / "annotations/instances_val.json", "batch_size": batch_size}
        options |= {"drawings": batch_size > 1}
        predict(cfg, tmp_path / "weights.pth", shapes / "val", output, **options)
        assert_same(read(output)[0], expected)
    drawn = sorted(path.name for path in (output / "drawings").iterdir())
    assert drawn == sorted(path.name for path in (shapes / "val").iterdir())


@pytest.mark.parametrize("batched", [False, True])
def test_an_exported_model_predicts_as_its_checkpoint(trained_run, shapes, tmp_path, batched):
    cfg, weights = load_config(trained_run / "config.yaml"), trained_run / "model_final.pth"
    path, report = export_detector(cfg, weights, tmp_path / "export", batched=batched, runs=1)
    assert report["ok"]
    # What it was exported with counts, not the config.
    other = load_config(trained_run / "config.yaml", ["INPUT.MIN_SIZE_TEST", "96"])
    for output, settings, source in (("eager", cfg, weights), ("exported", other, path)):
        predict(settings, source, shapes / "val", tmp_path / output, batch_size=3, drawings=False)
    results, images = read(tmp_path / "exported")
    assert_same(results, read(tmp_path / "eager")[0])
    assert len(results) > 50 and images == read(tmp_path / "eager")[1]


def test_an_exported_model_is_not_augmented(tmp_path):
    with pytest.raises(InputError, match="--tta .*model.onnx is an exported one"):
        predict(small_config(), tmp_path / "model.onnx", tmp_path, tmp_path / "output", tta=True)


def test_results_without_annotations_count_files_by_name(trained_run, shapes, tmp_path):
    cfg = load_config(trained_run / "config.yaml")
    predict(cfg, trained_run / "model_final.pth", shapes / "val", tmp_path / "out", drawings=False)
    results, images = read(tmp_path / "out")
    assert [image["file_name"] for image in images["images"]] == sorted(p.name for p in (shapes / "val").iterdir())
    assert [image["id"] for image in images["images"]] == list(range(1, 9))
    assert {result["category_id"] for result in results} <= {1, 2, 3}
    assert images["categories"][0]["name"] == "circle"


def test_augmented_results_are_for_the_files_too(trained_run, shapes, tmp_path):
    cfg = load_config(trained_run / "config.yaml", ["TEST.AUG.MIN_SIZES", "(64,)", "TEST.AUG.FLIP", "False"])
    for tta in (False, True):
        folder = tmp_path / str(tta)
        predict(cfg, trained_run / "model_final.pth", shapes / "val", folder, tta=tta, drawings=False, batch_size=2)
    augmented, plain = read(tmp_path / "True")[0], read(tmp_path / "False")[0]
    # Some boxes are merged that overlap once they are cut at the image's border.
    assert 0.8 * len(plain) < len(augmented) <= len(plain)
    places = np.array([[one["image_id"] * 1e4, one["category_id"] * 1e4, *one["bbox"]] for one in plain])
    for one in augmented:
        place = [one["image_id"] * 1e4, one["category_id"] * 1e4, *one["bbox"]]
        distance = np.abs(places - place).max(axis=1)
        assert distance.min() < 1e-2
        assert plain[distance.argmin()]["score"] == pytest.approx(one["score"], abs=1e-4)


def test_only_images_of_one_resized_size_share_a_batch(tmp_path):
    sizes = [(40, 60), (64, 50), (80, 120), (20, 30), (64, 50), (40, 61), (160, 240)]
    for number, size in enumerate(sizes):
        save(tmp_path / f"in/{number}.png", picture(*size, bright="left" if number % 2 else "right"))
    runner = HalfFinder()
    run_on(tmp_path / "in", tmp_path / "out", runner=runner, batch_size=3)
    assert sorted(map(len, runner.batches)) == [1, 1, 2, 3]
    results, images = read(tmp_path / "out")
    assert [result["image_id"] for result in results] == [1, 2, 3, 4, 5, 6, 7]
    assert [result["category_id"] for result in results] == [7, 3, 7, 3, 7, 3, 7]
    assert [(image["height"], image["width"]) for image in images["images"]] == sizes
    assert results[0]["bbox"] == [30, 0, 30, 40] and results[1]["bbox"] == [0, 0, 25, 64]


# -- kinds of files --------------------------------------------------------------------------------


def test_unreadable_files_are_reported_and_the_others_done(tmp_path, capsys):
    source = tmp_path / "in"
    save(source / "b.png", picture(40, 60))
    save(source / "below/deep.png", picture(40, 60, bright="right")[..., 0].astype(np.uint16) * 257)
    save(source / "cut.jpg", np.random.default_rng(0).integers(0, 255, (90, 70, 3), np.uint8))
    (source / "cut.jpg").write_bytes((source / "cut.jpg").read_bytes()[:-1500])
    (source / "empty.PNG").write_bytes(b"")
    (source / "text.jpeg").write_text("this is no image")
    (source / "notes.txt").write_text("left alone")
    (source / "._hidden.jpg").write_text("left alone")
    save(source / "thin.png", picture(1, 4000))
    summary = run_on(source, tmp_path / "out", draw=True)
    results, images = read(tmp_path / "out")
    assert [image["file_name"] for image in images["images"]] == ["b.png", "below/deep.png"]
    assert [(r["image_id"], r["category_id"]) for r in results] == [(1, 3), (2, 7)]
    assert results[1]["score"] == pytest.approx(200 / 255, abs=0.01)
    assert [item.name for item in summary.skipped] == ["cut.jpg", "empty.PNG", "text.jpeg", "thin.png"]
    assert [item["file_name"] for item in images["skipped"]] == [item.name for item in summary.skipped]
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"skipped {item.name}: {item.reason}" for item in summary.skipped)
    assert "truncated" in summary.skipped[0].reason and summary.skipped[1].reason == "it is empty"
    assert summary.lines()[-1] == "skipped 4 files that could not be read"
    drawn = {path.relative_to(tmp_path / "out/drawings").as_posix() for path in (tmp_path / "out").rglob("*.png")}
    assert drawn == {"b.png", "below/deep.png"}


def test_nothing_readable_is_still_a_result(tmp_path):
    (tmp_path / "text.jpg").write_text("this is no image")
    summary = run_on(tmp_path / "text.jpg", tmp_path / "out", draw=True)
    assert read(tmp_path / "out") == ([], json.loads((tmp_path / "out/images.json").read_text()))
    assert (summary.done, len(summary.skipped)) == (0, 1) and not (tmp_path / "out/drawings").exists()


@pytest.mark.parametrize("orientation, bright", [(1, 3), (2, 7), (3, 7), (6, None)])
def test_turned_images_are_predicted_upright(tmp_path, orientation, bright):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(picture(40, 60)).save(tmp_path / "turned.jpg", exif=exif)
    run_on(tmp_path / "turned.jpg", tmp_path / "out")
    results, images = read(tmp_path / "out")
    size = (60, 40) if orientation == 6 else (40, 60)
    assert (images["images"][0]["height"], images["images"][0]["width"]) == size
    assert bright in (None, results[0]["category_id"])
    assert results[0]["bbox"][2:] == [size[1] / 2, size[0]]


def test_the_output_folder_is_not_read_again(tmp_path):
    save(tmp_path / "in/a.png", picture(40, 60))
    for _ in range(2):
        assert run_on(tmp_path / "in", tmp_path / "in/out", draw=True).done == 1
    assert (tmp_path / "in/out/drawings/a.png").exists()


def test_no_drawing_takes_the_place_of_another(tmp_path):
    names = ["a.bmp", "a.bmp.png", "a.jpg", "a.png", "b.JPG", "below/a.png", "c.tif"]
    for name in names:
        save(tmp_path / "in" / name, picture(40, 60))
    run_on(tmp_path / "in", tmp_path / "out", draw=True, score_threshold=0.3)
    drawings = tmp_path / "out/drawings"
    drawn = {path.relative_to(drawings).as_posix() for path in drawings.rglob("*") if path.is_file()}
    assert drawn == {"a.bmp.png.png", "a.bmp.png", "a.jpg", "a.png", "b.JPG", "below/a.png", "c.tif.png"}


def test_drawings_show_what_is_above_the_threshold(tmp_path):
    save(tmp_path / "a.png", picture(40, 60))
    drawn = []
    for threshold in (0.3, 0.5):
        run_on(tmp_path / "a.png", tmp_path / "out", draw=True, score_threshold=threshold)
        drawn.append(cv2.imread(str(tmp_path / "out/drawings/a.png")).astype(int))
        assert len(read(tmp_path / "out")[0]) == 1
    # The bright half is 200, 100, 0 in RGB; "left 39%" is written over its upper left corner, light on black.
    with_box, without = drawn
    assert with_box.shape == without.shape == (320, 480, 3)
    for drawing in drawn:
        assert np.abs(drawing[250, 100] - [0, 100, 200]).max() < 5
    assert with_box[:20, :60].min(axis=-1).max() > 100 > without[:20, :60].min(axis=-1).max()
    assert (with_box[:, 300:] == without[:, 300:]).all()


def write_video(path: Path, frames: int, *, size: tuple[int, int] = (40, 60)) -> None:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 8, size[::-1])
    assert writer.isOpened()
    for number in range(frames):
        writer.write(np.ascontiguousarray(picture(*size, bright="left" if number % 3 else "right")[..., ::-1]))
    writer.release()


def test_video(tmp_path):
    write_video(tmp_path / "clip.avi", 7)
    video, runner = Video(tmp_path / "clip.avi"), HalfFinder()
    output = tmp_path / "out"
    output.mkdir()
    drawer = VideoDrawings(output / "drawings", "clip.avi", video.frame_rate)
    summary = run(video, runner, ANY, output, drawer, batch_size=3)
    results, images = read(output)
    assert (summary.unit, summary.done, summary.skipped) == ("frame", 7, ())
    assert [len(batch) for batch in runner.batches] == [3, 3, 1]
    assert [result["category_id"] for result in results] == [7, 3, 3, 7, 3, 3, 7]
    assert images["images"][3] == {
        **{"id": 4, "file_name": "clip.avi", "frame": 3, "seconds": 0.375},
        **{"height": 40, "width": 60},
    }
    assert results[3]["score"] == pytest.approx(100 / 255, abs=0.02)
    drawn = cv2.VideoCapture(str(output / "drawings/clip.mp4"))
    assert drawn.get(cv2.CAP_PROP_FRAME_COUNT) == 7 and drawn.get(cv2.CAP_PROP_FPS) == 8
    assert [path.name for path in (output / "drawings").iterdir()] == ["clip.mp4"]


def test_video_without_a_codec_is_drawn_as_images(tmp_path, capsys):
    write_video(tmp_path / "clip.avi", 2)
    drawer = VideoDrawings(tmp_path / "drawings", "clip.avi", 8, codec="none")
    run(Video(tmp_path / "clip.avi"), HalfFinder(), ANY, tmp_path, drawer)
    assert sorted(path.name for path in (tmp_path / "drawings/clip").iterdir()) == ["000000.png", "000001.png"]
    assert "frames are drawn as PNG in" in capsys.readouterr().err


def test_videos_that_end_early_or_are_none(tmp_path):
    write_video(tmp_path / "clip.avi", 30)
    content = (tmp_path / "clip.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.avi").write_text("this is no video")
    summary = run(Video(tmp_path / "cut.avi"), HalfFinder(), ANY, tmp_path, None)
    assert 5 < summary.done < 25
    assert f"only {summary.done} of its 30 frames can be read" in summary.skipped[0].reason
    assert len(read(tmp_path)[0]) == summary.done
    summary = run(Video(tmp_path / "text.avi"), HalfFinder(), ANY, tmp_path, None)
    assert (summary.done, summary.skipped[0].reason) == (0, "it is no video that OpenCV can read here")


# -- parts -----------------------------------------------------------------------------------------


def test_reading_ahead_is_bounded_and_in_order():
    made = []

    def numbers():
        for number in range(20):
            made.append(number)
            yield number

    taken = []
    for number in read_ahead(numbers(), depth=2):
        taken.append(number)
        assert len(made) <= len(taken) + 2
    assert taken == list(range(20))


def test_an_error_while_reading_ahead_arrives():
    def numbers():
        yield 1
        raise InputError("broken")

    ahead = read_ahead(numbers())
    assert next(ahead) == 1
    with pytest.raises(InputError, match="broken"):
        next(ahead)


def test_a_json_list_is_in_order_of_its_index(tmp_path):
    with (tmp_path / "list.json").open("w") as file:
        items = JsonList(file)
        for index in (2, 0, 3, 1):
            items.put(index, [{"index": index}] * (index % 3))
        items.close()
    assert json.loads((tmp_path / "list.json").read_text()) == [{"index": 1}, {"index": 2}, {"index": 2}]


def test_an_interruption_leaves_the_results_before_it(tmp_path):
    for number in range(6):
        save(tmp_path / f"in/{number}.png", picture(40, 60))
    run_on(tmp_path / "in", tmp_path / "out")
    before = read(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run_on(tmp_path / "in", tmp_path / "out", runner=HalfFinder(stop_after=2), batch_size=1)
    assert read(tmp_path / "out") == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["images.json", "results.json"]


def test_both_files_are_of_one_run(tmp_path):
    save(tmp_path / "a.png", picture(40, 60))
    run_on(tmp_path / "a.png", tmp_path / "out")
    before = read(tmp_path / "out")
    save(tmp_path / "b.png", picture(40, 60))
    images = [ImageFile(tmp_path / "b.png", "b.png", 9)]
    # What images.json cannot be made of, when results.json is complete.
    with pytest.raises(ValueError, match="zip"):
        run(ImageFiles(images), HalfFinder(), Categories((3, 7), ("left",)), tmp_path / "out", None)
    assert read(tmp_path / "out") == before and len(list((tmp_path / "out").iterdir())) == 2


def test_images_that_an_exported_model_cannot_take_are_skipped(tmp_path):
    for name, size in (("a", (48, 64)), ("b", (16, 64)), ("c", (48, 300))):
        save(tmp_path / f"in/{name}.png", picture(*size))
    path, resizing = write(tmp_path, "retinanet", "torchscript"), {"short_side": None, "longest_side": None}
    metadata = json.loads(metadata_path(path).read_text())
    metadata["input"]["sides"], metadata["resizing"] = [32, 256], metadata["resizing"] | resizing
    metadata_path(path).write_text(json.dumps(metadata))
    cfg = small_config()
    summary = predict(cfg, path, tmp_path / "in", tmp_path / "out", drawings=False, batch_size=3)
    assert summary.done == 1 and [item.name for item in summary.skipped] == ["b.png", "c.png"]
    assert summary.skipped[0].reason == "16 x 64 pixels: resized to 16 x 64, and the model takes sides of 32 to 256"
    write_video(tmp_path / "clip.avi", 2, size=(16, 64))
    with pytest.raises(InputError, match="clip.avi: frames of 16 x 64 pixels: .* sides of 32 to 256"):
        predict(cfg, path, tmp_path / "clip.avi", tmp_path / "video", drawings=False)
    with pytest.raises(InputError, match="NUM_CLASSES is 80, and the weights know 3 classes"):
        predict(small_config("retinanet", *EIGHTY), path, tmp_path / "in", tmp_path / "eighty")
    assert not (tmp_path / "eighty").exists()


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_images_too_thin_to_augment_are_skipped(tmp_path, detector):
    cfg = small_config(detector, "TEST.AUG.MIN_SIZES", "(48, 64)", "TEST.AUG.MAX_SIZE", "96", "DATASETS.TEST", "()")
    torch.save({"model": lively_detector(cfg).state_dict()}, tmp_path / "weights.pth")
    save(tmp_path / "in/a.png", picture(40, 60))
    save(tmp_path / "in/thin.png", picture(1, 20000))
    summary = predict(cfg, tmp_path / "weights.pth", tmp_path / "in", tmp_path / "out", tta=True, drawings=False)
    assert summary.done == 1 and [item.name for item in summary.skipped] == ["thin.png"]
    assert summary.skipped[0].reason == "1 x 20000 pixels: resized, nothing would be left of it"


def test_categories_of_the_test_set_or_else_from_1(shapes):
    known = find_categories(small_config(), None)
    assert (known.ids, known.names) == ((1, 2, 3), ("circle", "square", "triangle")) and len(known.colors) == 3
    coco = find_categories(small_config("retinanet", "DATASETS.TEST", "('coco_2017_val',)", *EIGHTY), None)
    assert coco.ids[11:13] == (13, 14) and coco.names[79] == "toothbrush"
    for classes in (("0", "1", "2"), ("circle", "square", "triangle")):
        assert find_categories(small_config(), classes) == known
    assert find_categories(small_config(), ("a", "b", "c")) == Categories((1, 2, 3), ("a", "b", "c"))
    assert find_categories(small_config(), ("a", "b", "c"), annotated=True) == known
    with pytest.raises(InputError, match=r"RETINANET.NUM_CLASSES is 80, and the weights know 3 classes \(a, b, c\)"):
        find_categories(small_config("retinanet", *EIGHTY), ("a", "b", "c"))
    unknown = small_config("retinanet", "DATASETS.TEST", "()")
    assert find_categories(unknown, ("a", "b", "c")).names == ("a", "b", "c")
    assert find_categories(unknown, None) == Categories((1, 2, 3), ("class 1", "class 2", "class 3"))
    assert find_categories(small_config("retinanet", *EIGHTY), None).names[0] == "class 1"


# -- mistakes --------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """An image in a folder, and a file that stands for weights."""
    save(tmp_path / "in/a.png", picture(40, 60))
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.pth").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"batch_size": 0}, "--batch-size is 0: it is 1 or more"),
        ({"score_threshold": 1.5}, "--score-threshold is 1.5: it is 0 to 1"),
        ({"source": "absent"}, "--input .*absent: there is no such file or folder"),
        ({"source": "empty"}, "--input .*empty: there is no image in it"),
        ({"output": "weights.pth"}, "--output .*weights.pth: it is a file, and a folder is needed"),
        ({"output": "weights.pth/out"}, "--output .*out: .*weights.pth cannot be written to"),
        ({"output": "in"}, "--output .*in: it is the --input folder; choose another"),
        ({"weights": "absent.pth"}, "there is no weights file .*absent.pth"),
        ({"annotations": "absent.json"}, "--annotations .*absent.json: there is no such file"),
        ({"annotations": "absent.json", "source": "in/a.png"}, "--annotations are for the images of a folder"),
    ],
)
def test_mistakes(files, changes, expected):
    paths = {"weights": "weights.pth", "source": "in", "output": "out"}
    paths |= {key: value for key, value in changes.items() if isinstance(value, str)}
    arguments = changes | {key: files / value for key, value in paths.items()}
    with pytest.raises(InputError, match=expected) as caught:
        predict(small_config(), **arguments)
    assert "\n" not in str(caught.value) and not (files / "out").exists()


def test_mistakes_in_the_config(files):
    arguments = files / "weights.pth", files / "in", files / "out"
    with pytest.raises(InputError, match="a SemanticSegmentor finds no boxes to predict: RetinaNet and Gen"):
        predict(small_config("semantic_fpn"), *arguments)
    with pytest.raises(InputError, match="INPUT.FORMAT is L: it is RGB or BGR"):
        predict(small_config("retinanet", "INPUT.FORMAT", "L"), *arguments)
    with pytest.raises(InputError, match="no weights were given"):
        predict(small_config(), "", files / "in", files / "out")
    with pytest.raises(InputError, match="TEST.AUG.MIN_SIZES"):
        predict(small_config("retinanet", "TEST.AUG.MIN_SIZES", "(0,)"), *arguments, tta=True)


@pytest.mark.parametrize("name", ["images.json", "results.json"])
def test_annotations_are_not_written_over(files, name):
    (files / "out").mkdir()
    (files / "out" / name).write_text("{}")
    with pytest.raises(InputError, match=f"--annotations .*{name}: results would be written over it"):
        arguments = files / "weights.pth", files / "in", files / "out"
        predict(small_config(), *arguments, annotations=files / "in/../out" / name)
    assert (files / "out" / name).read_text() == "{}"


def test_drawings_would_be_written_over_the_input(files):
    save(files / "out/drawings/a.png", picture(40, 60))
    for source in ("out/drawings", "out/drawings/a.png"):
        with pytest.raises(InputError, match="drawings of it would be written over it"):
            predict(small_config(), files / "weights.pth", files / source, files / "out")


@pytest.mark.parametrize("name", ["../a.png", "{}/elsewhere.png"])
def test_annotated_images_outside_the_folder(shapes, files, name):
    content = json.loads((shapes / "annotations/instances_val.json").read_text())
    path = files / name.format(files)
    content["images"], content["annotations"] = content["images"][:1], []
    content["images"][0]["file_name"] = name.format(files)
    (files / "annotations.json").write_text(json.dumps(content))
    save((files / "in" / path).resolve() if name.startswith("..") else path, picture(40, 60))
    save(files / "a.png", picture(40, 60))
    with pytest.raises(InputError, match="outside the folder"):
        arguments = files / "weights.pth", files / "in", files / "out"
        predict(small_config(), *arguments, annotations=files / "annotations.json")


def test_an_annotated_image_of_another_size_is_skipped(shapes, trained_run, tmp_path):
    shutil.copytree(shapes / "val", tmp_path / "in")
    first = min((tmp_path / "in").iterdir())
    save(first, picture(40, 60))
    cfg = load_config(trained_run / "config.yaml")
    options = {"annotations": shapes / "annotations/instances_val.json", "drawings": False}
    summary = predict(cfg, trained_run / "model_final.pth", tmp_path / "in", tmp_path / "out", **options)
    assert summary.done == 7 and [item.name for item in summary.skipped] == [first.name]
    assert summary.skipped[0].reason.startswith("it is 40 x 60 pixels, and its annotations say ")


# -- the tool --------------------------------------------------------------------------------------


def test_tool(trained_run, shapes, tmp_path):
    shutil.copytree(shapes / "val", tmp_path / "in")
    (tmp_path / "in/text.jpg").write_text("this is no image")
    arguments = ["--config-file", trained_run / "config.yaml", "--weights", trained_run / "model_final.pth"]
    arguments += ["--input", tmp_path / "in", "--output", tmp_path / "out", "--batch-size", 2]
    result = run_tool("predict.py", *arguments, datasets_root=shapes.parent)
    assert result.returncode == 2, result.stderr
    assert "skipped text.jpg: it is no image of a known format" in result.stderr.splitlines()
    results, images = read(tmp_path / "out")
    out = tmp_path / "out"
    assert result.stdout.splitlines() == [
        f"8 images, {len(results)} detections",
        f"wrote {out}/results.json, {out}/images.json, {out}/drawings",
        "skipped 1 file that could not be read",
    ]
    assert len(images["images"]) == len(list((tmp_path / "out/drawings").iterdir())) == 8
