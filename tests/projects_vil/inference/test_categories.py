"""Ids and names of classes."""

import pytest

from backbones import InputError
from projects_vil.inference.categories import Categories, find_categories
from tests.projects_vil.helpers import small_config
from tests.projects_vil.inference.helpers import EIGHTY


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
