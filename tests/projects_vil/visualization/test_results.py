"""Contact sheets and run summaries, from real files that detectron2 and pycocotools read."""

import json
from pathlib import Path

import cv2
import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from pycocotools.coco import COCO

from backbones.utils.errors import InputError
from projects_vil.data import IGNORED_LABEL, label_reader, write_shapes_dataset
from projects_vil.visualization import draw_results, predictions_file, summarize_run
from projects_vil.visualization.panels import GAP, HEADER, PANEL_HEIGHT, PANEL_WIDTH

NAME = "visualize_test_shapes"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("visualize") / "data"
    write_shapes_dataset(output, num_train=1, num_val=5, short_side=64)
    register_coco_instances(NAME, {}, str(output / "annotations/instances_val.json"), str(output / "val"))
    yield output
    DatasetCatalog.remove(NAME)
    MetadataCatalog.remove(NAME)


def perfect_results(dataset: Path, *, with_masks: bool = True, score: float = 0.9) -> list[dict]:
    """Results in COCOEvaluator's form that equal the ground truth."""
    coco = COCO(dataset / "annotations/instances_val.json")
    results = []
    for annotation in coco.anns.values():
        result = {key: annotation[key] for key in ("image_id", "category_id", "bbox")} | {"score": score}
        if with_masks:
            rle = coco.annToRLE(annotation)
            result["segmentation"] = {"size": list(map(int, rle["size"])), "counts": rle["counts"].decode()}
        results.append(result)
    return results


def draw(folder: Path, results, **options) -> np.ndarray:
    predictions = folder / "results.json"
    predictions.write_text(json.dumps(results))
    assert draw_results(NAME, predictions, folder / "sheet.png", **options) == 5
    return cv2.imread(str(folder / "sheet.png")).astype(int)


def pictures(sheet: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Left and right panel of a sheet with one row, without titles."""
    below = sheet[2 * HEADER :]
    return below[:, :PANEL_WIDTH], below[:, PANEL_WIDTH + GAP :]


def drawn_sizes(dataset: Path) -> list[tuple[int, int]]:
    """Height and width in pixels at which each image should be drawn."""
    sizes = []
    for image in COCO(dataset / "annotations/instances_val.json").imgs.values():
        scale = min(PANEL_WIDTH / image["width"], PANEL_HEIGHT / image["height"])
        sizes.append((round(image["height"] * scale), round(image["width"] * scale)))
    return sizes


def test_sheet_has_a_row_for_each_image(dataset, tmp_path):
    sheet = draw(tmp_path, perfect_results(dataset), num_images=8)
    height = HEADER + sum(HEADER + height for height, _ in drawn_sizes(dataset))
    assert sheet.shape == (height, 2 * PANEL_WIDTH + GAP, 3)
    assert sheet.std() > 20


def test_images_are_enlarged_to_the_panel(dataset, tmp_path):
    sheet = draw(tmp_path, [], num_images=1)
    height, width = drawn_sizes(dataset)[0]
    assert sheet.shape[0] == 2 * HEADER + height
    assert height == PANEL_HEIGHT or width == PANEL_WIDTH


@pytest.mark.parametrize("with_masks", [True, False])
def test_predictions_are_drawn_on_the_right(dataset, tmp_path, with_masks):
    truth, drawn = pictures(draw(tmp_path, perfect_results(dataset, with_masks=with_masks), num_images=1))
    same_truth, bare = pictures(draw(tmp_path, [], num_images=1))
    np.testing.assert_array_equal(truth, same_truth)
    assert np.mean(np.any(drawn != bare, axis=2)) > 0.005
    assert np.abs(truth - drawn).mean() < np.abs(truth - bare).mean()


def test_low_scores_are_left_out(dataset, tmp_path):
    results = perfect_results(dataset, score=0.3)
    _, bare = pictures(draw(tmp_path, [], num_images=1))
    _, above = pictures(draw(tmp_path, results, num_images=1, score_threshold=0.31))
    _, below = pictures(draw(tmp_path, results, num_images=1, score_threshold=0.3))
    np.testing.assert_array_equal(above, bare)
    assert np.any(below != bare)


def test_empty_masks_leave_the_box(dataset, tmp_path):
    results = perfect_results(dataset)
    for result in results:
        height, width = result["segmentation"]["size"]
        result["segmentation"] = {"size": [height, width], "counts": [height * width]}
    with_empty_masks = draw(tmp_path, results, num_images=1)
    without_masks = draw(tmp_path, perfect_results(dataset, with_masks=False), num_images=1)
    np.testing.assert_array_equal(with_empty_masks, without_masks)


def test_dataset_colors_are_used(dataset, tmp_path):
    before = draw(tmp_path, [], num_images=1)
    DatasetCatalog.get(NAME)
    metadata = MetadataCatalog.get(NAME)
    metadata.thing_colors = [(255, 255, 255)] * 3
    try:
        after = draw(tmp_path, [], num_images=1)
    finally:
        del metadata.thing_colors
    assert after.sum() > before.sum()


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot read .*results.json"),
        ("{not json", "results.json is not JSON"),
        ('{"AP": 1}', "results.json is no list of COCO results"),
        ('[{"image_id": 2}]', "results.json is no list of COCO results"),
        ('[{"image_id": 139, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}]', "image 139"),
        ('[{"image_id": 2, "category_id": 18, "bbox": [1, 2, 3, 4], "score": 0.5}]', "category 18"),
    ],
)
def test_wrong_predictions_file(dataset, tmp_path, content, message):
    predictions = tmp_path / "results.json"
    if content is not None:
        predictions.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        draw_results(NAME, predictions, tmp_path / "sheet.png")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sheet.png").exists()


def test_mask_of_another_size(dataset, tmp_path):
    results = perfect_results(dataset)
    results[0]["segmentation"]["size"].reverse()
    with pytest.raises(InputError, match="does not fit"):
        draw(tmp_path, results)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_images": 0}, "--num-images is 0"),
        ({"num_images": 1000}, "--num-images is 1000"),
        ({"score_threshold": 1.5}, "--score-threshold is 1.5"),
    ],
)
def test_options_out_of_range(dataset, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        draw(tmp_path, [], **options)


def test_unknown_dataset_names_the_closest(dataset, tmp_path):
    with pytest.raises(InputError, match=f"did you mean '{NAME}'"):
        draw_results(NAME + "x", tmp_path / "results.json", tmp_path / "sheet.png")


def test_unwritable_output(dataset, tmp_path):
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(InputError, match="cannot write"):
        draw_results(NAME, tmp_path / "results.json", tmp_path / "results.json" / "sheet.png")


def test_missing_image(tmp_path):
    name = "visualize_test_missing_image"
    write_shapes_dataset(tmp_path, num_train=1, num_val=1, short_side=64)
    annotations, wrong_folder = tmp_path / "annotations/instances_val.json", tmp_path / "train"
    register_coco_instances(name, {}, str(annotations), str(wrong_folder))
    (tmp_path / "results.json").write_text("[]")
    try:
        with pytest.raises(InputError, match="cannot read the image .*000000000002.jpg"):
            draw_results(name, tmp_path / "results.json", tmp_path / "sheet.png")
    finally:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


@pytest.fixture
def run(tmp_path) -> Path:
    metrics = {"shapes_val": {"bbox": {"AP": 63.14, "AP50": 90.0}, "segm": {"AP": 57.96}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(metrics))
    (tmp_path / "model_final.pth").write_bytes(b"")
    (tmp_path / "export").mkdir()
    return tmp_path


def test_summary_of_a_run(run):
    lines = summarize_run(run, "shapes_val", num_images=100, drawing=run / "predictions.png")
    assert lines == [
        "box AP 63.1   mask AP 58.0   (shapes_val, 100 images)",
        f"results in {run}: model_final.pth, evaluation.json, export/, predictions.png",
    ]


def test_summary_without_masks_export_and_final_weights(run, tmp_path):
    (run / "evaluation.json").write_text('{"shapes_val": {"bbox": {"AP": NaN}}}')
    (run / "model_final.pth").rename(run / "model_0000049.pth")
    (run / "export").rmdir()
    lines = summarize_run(run, "shapes_val", num_images=7, drawing="elsewhere/sheet.png")
    assert lines == [
        "box AP nan   (shapes_val, 7 images)",
        f"results in {run}: model_0000049.pth, evaluation.json, elsewhere/sheet.png",
    ]


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"other": {"bbox": {"AP": 1}}}', '{"shapes_val": {"bbox": null}}']
)
def test_summary_without_evaluation(run, content):
    (run / "evaluation.json").unlink()
    if content is not None:
        (run / "evaluation.json").write_text(content)
    with pytest.raises(InputError, match="evaluation.json"):
        summarize_run(run, "shapes_val", num_images=1, drawing=run / "predictions.png")


# -- label images ----------------------------------------------------------------------------------

SEM_SEG = "shapes_sem_seg_val"


def perfect_segments() -> list[dict]:
    """Segments in SemSegEvaluator's form that equal the ground truth, with squares where labels are ignored."""
    read, segments = label_reader(SEM_SEG), []
    for record in DatasetCatalog.get(SEM_SEG):
        labels = read(record["sem_seg_file_name"])
        labels[labels == IGNORED_LABEL] = 2
        for label in np.unique(labels):
            rle = mask_util.encode(np.asfortranarray(labels == label, dtype=np.uint8))
            segmentation = {"size": list(map(int, rle["size"])), "counts": rle["counts"].decode()}
            segments.append(
                {"file_name": record["file_name"], "category_id": int(label) + 1, "segmentation": segmentation}
            )
    return segments


def draw_segments(folder: Path, segments, **options) -> np.ndarray:
    (folder / "segments.json").write_text(json.dumps(segments))
    assert draw_results(SEM_SEG, folder / "segments.json", folder / "sheet.png", **options) == 6
    return cv2.imread(str(folder / "sheet.png")).astype(int)


def test_segments_are_drawn_beside_the_labels(shapes_sem_seg, tmp_path):
    sheet = draw_segments(tmp_path, perfect_segments(), num_images=1)
    assert sheet.shape[1] == 2 * PANEL_WIDTH + GAP
    truth, drawn = pictures(sheet)
    same_truth, bare = pictures(draw_segments(tmp_path, [], num_images=1))
    np.testing.assert_array_equal(truth, same_truth)
    assert np.abs(truth - drawn).mean() < 0.3 * np.abs(truth - bare).mean()
    assert len(draw_segments(tmp_path, [], num_images=32)) > 6 * 200


def test_colors_of_the_dataset_for_labels(shapes_sem_seg, tmp_path):
    before = draw_segments(tmp_path, perfect_segments(), num_images=1)
    metadata = MetadataCatalog.get(SEM_SEG)
    colors = metadata.stuff_colors
    del metadata.stuff_colors
    metadata.stuff_colors = [(255, 255, 255)] * 4
    try:
        after = draw_segments(tmp_path, perfect_segments(), num_images=1)
    finally:
        del metadata.stuff_colors
        metadata.stuff_colors = colors
    assert after.sum() > 1.1 * before.sum()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.pop("file_name"), "is no list of segments"),
        (lambda s: s.update(segmentation={"size": [3, 4]}), "is no list of segments"),
        (lambda s: s.update(file_name="other.jpg"), "other.jpg, category 1.*does not fit 'shapes_sem_seg_val'"),
        (lambda s: s.update(category_id=9), "category 9.*does not fit 'shapes_sem_seg_val'"),
        (lambda s: s["segmentation"]["size"].reverse(), "pixels has labels of"),
    ],
)
def test_wrong_segments(shapes_sem_seg, tmp_path, change, message):
    segments = perfect_segments()
    change(segments[0])
    with pytest.raises(InputError, match=message) as caught:
        draw_segments(tmp_path, segments, num_images=1)
    assert "\n" not in str(caught.value)


def test_summary_of_a_segmentation_run(run):
    (run / "evaluation.json").write_text('{"shapes_sem_seg_val": {"sem_seg": {"mIoU": 41.26, "pACC": 90.0}}}')
    lines = summarize_run(run, SEM_SEG, num_images=100, drawing=run / "predictions.png")
    assert lines[0] == "mIoU 41.3   (shapes_sem_seg_val, 100 images)"


def test_which_predictions_belong_to_a_dataset(dataset, shapes_sem_seg, tmp_path):
    assert predictions_file(tmp_path, NAME) == tmp_path / "inference/coco_instances_results.json"
    assert predictions_file(tmp_path, SEM_SEG) == tmp_path / "inference/sem_seg_predictions.json"
    own = tmp_path / "inference" / SEM_SEG / "sem_seg_predictions.json"
    own.parent.mkdir(parents=True)
    own.write_text("[]")
    assert predictions_file(tmp_path, SEM_SEG) == own
