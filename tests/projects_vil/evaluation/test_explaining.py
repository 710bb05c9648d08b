"""What is said of figures that are not a number, or next to nothing."""

import pytest

from projects_vil.evaluation import explain_results

NAN = float("nan")
GOOD = {"AP": 30.0, "AP50": 50.0, "AP75": 31.0, "APs": 10.0, "APm": 20.0, "APl": 40.0}


def test_good_figures_need_no_words():
    assert explain_results({"bbox": GOOD, "sem_seg": {"mIoU": 40.0, "IoU-road": 80.0}}) == []


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"APl": NAN}, "bbox: APl is not a number: the dataset has no large objects (above 96 x 96 pixels)"),
        ({"APs": NAN}, "bbox: APs is not a number: the dataset has no small objects (below 32 x 32 pixels)"),
        ({"AP-dog": 1.0, "AP-cat": NAN}, "bbox: AP of cat is not a number: the dataset has no such objects"),
        ({"AP": 0.0}, "bbox: AP is 0.000: likely causes are few iterations, classes in another order"),
        ({"AP": NAN, "AP50": NAN, "APs": NAN}, "bbox: AP is not a number: there is no detection at all"),
    ],
)
def test_one_line_for_each_cause(figures, words):
    (line,) = explain_results({"bbox": GOOD | figures})
    assert line.startswith(words) and "\n" not in line


def test_many_absent_classes_are_one_short_line():
    absent = {f"AP-class {number}": NAN for number in range(60)}
    (line,) = explain_results({"segm": GOOD | absent})
    assert "class 4 and 55 more classes are not a number" in line


def test_an_absent_class_of_label_images():
    (line,) = explain_results({"sem_seg": {"mIoU": 3.0, "IoU-road": 4.0, "IoU-sky": NAN}})
    assert line == "sem_seg: IoU of sky is not a number: the dataset has no such objects"
