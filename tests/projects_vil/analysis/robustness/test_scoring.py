"""The arithmetic, by hand on known predictions."""

import pytest
import torch

from projects_vil.analysis.robustness.scoring import (
    ALEXNET_ERRORS,
    CORRUPTIONS,
    Score,
    corruption_error,
    mean_corruption_error,
    score,
    top_classes,
)

# Of AlexNet, by severity: what the means of ALEXNET_ERR (google-research/augmix, imagenet.py) are of. From the list
# imagenetc_alexnet_error_rates_list in public code, which does not say where it has them from.
ALEXNET = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.9487, 0.9872, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.5843, 0.70048, 0.82108, 0.8975, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.9187, 0.94952),
    "frost": (0.6139, 0.79734, 0.8879, 0.89942, 0.9343),
    "fog": (0.67474, 0.7605, 0.84378, 0.8726, 0.945),
    "brightness": (0.4514, 0.48502, 0.54048, 0.62166, 0.7244),
    "contrast": (0.64548, 0.7615, 0.88874, 0.9776, 0.9927),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.5462, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
}


def test_the_five_most_probable_come_in_order():
    logits = torch.tensor([[0.1, 0.7, 0.3, 0.6, 0.2, 0.5, 0.4], [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    assert top_classes(logits).tolist() == [[1, 3, 5, 6, 2], [0, 1, 2, 3, 4]]


def test_only_the_classes_of_a_set_are_predicted():
    logits = torch.tensor([[0.1, 0.7, 0.3, 0.6, 0.2, 0.5, 0.4]])
    assert top_classes(logits, (0, 2, 3, 4, 6)).tolist() == [[3, 6, 2, 4, 0]]


def test_a_score_by_hand():
    predictions = torch.tensor([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [9, 8, 7, 6, 5], [5, 4, 3, 2, 1]])
    assert score(predictions, [{1}, {1}, {1}, {5}]) == Score(4, 4, 50.0, 75.0)


def test_any_label_is_right_and_images_without_one_are_left_out():
    predictions = torch.tensor([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [9, 8, 7, 6, 5]])
    assert score(predictions, [{7, 1}, set(), {6, 5}]) == Score(3, 2, 50.0, 100.0)


def test_a_score_needs_labels_for_all_and_one_at_least():
    predictions = torch.tensor([[1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="no image"):
        score(predictions, [set()])
    with pytest.raises(ValueError):
        score(predictions, [{1}, {2}])


def test_a_corruption_error_by_hand():
    # (0.1 + 0.2 + 0.3 + 0.4 + 0.5) / (5 x 0.564592)
    assert corruption_error("brightness", [0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx(100 * 1.5 / 2.82296)


def test_alexnet_has_an_error_of_100_everywhere():
    assert list(ALEXNET) == list(CORRUPTIONS) and len(CORRUPTIONS) == 15
    for name, errors in ALEXNET.items():
        assert sum(errors) / 5 == pytest.approx(ALEXNET_ERRORS[name], abs=1e-6)
        assert corruption_error(name, errors) == pytest.approx(100, abs=1e-3)
    assert mean_corruption_error(ALEXNET) == pytest.approx(100, abs=1e-3)


def test_a_mean_is_not_made_of_some():
    with pytest.raises(ValueError, match="all 15"):
        mean_corruption_error({name: ALEXNET[name] for name in CORRUPTIONS[1:]})
    with pytest.raises(ValueError, match="5 severities"):
        mean_corruption_error(ALEXNET | {"fog": (0.5,)})
