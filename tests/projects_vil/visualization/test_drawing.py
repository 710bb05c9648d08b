"""Masks over an image, pixel by pixel."""

from types import SimpleNamespace

import numpy as np

from projects_vil.visualization.drawing import MASK_OPACITY, draw_masks, tint

IMAGE = np.full((12, 17, 3), 100, np.uint8)
METADATA = SimpleNamespace(get=lambda name, otherwise: [(255, 0, 0), (0, 0, 200)])


def test_a_tint_is_a_share_of_a_colour():
    mask = np.zeros((12, 17), bool)
    mask[3:5, 6:9] = True
    tinted = tint(IMAGE, mask, np.array([1.0, 0.0, 0.2]), opacity=0.4)
    assert (tinted[mask] == [162, 60, 80]).all() and (tinted[~mask] == 100).all() and (IMAGE == 100).all()


def test_a_hole_in_a_mask_stays_one():
    mask = np.zeros((1, 12, 17), bool)
    mask[0, 1:11, 2:15] = True
    mask[0, 4:7, 6:10] = False
    drawn = draw_masks(IMAGE, mask, [1], METADATA)
    assert (drawn[4:7, 6:10] == 100).all() and (drawn[0] == 100).all()
    # Its edges, the outer one and that of the hole, have the class's colour, and the inside a share of it.
    assert (drawn[1, 2:15] == [0, 0, 200]).all() and (drawn[3, 6:10] == [0, 0, 200]).all()
    share = np.round(100 + MASK_OPACITY * (np.array([0, 0, 200]) - 100))
    assert (drawn[2, 3:14] == share).all()


def test_a_mask_that_is_cut_off_has_no_edge_at_the_images():
    drawn = draw_masks(IMAGE, np.ones((1, 12, 17), bool), [0], METADATA)
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) == 1 and (drawn != 100).any()
