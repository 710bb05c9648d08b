"""A model's classes as an annotation file numbers them."""

import pytest

from backbones import InputError
from projects_vil.checkpoint import Categories
from projects_vil.inference.categories import categories_as_annotated

MODEL = Categories((1, 2, 3), ("circle", "square", "triangle"))


def test_ids_by_name_in_the_order_of_the_model():
    colors = [(9, 0, 0), (8, 0, 0), (7, 0, 0)]
    dataset = Categories((10, 20, 30), ("triangle", "circle", "square"), colors)
    known = categories_as_annotated(MODEL, dataset)
    assert known == Categories((20, 30, 10), MODEL.names) and known.colors == [colors[1], colors[2], colors[0]]


@pytest.mark.parametrize("names", [("a", "b", "c"), ("circle", "b", "c"), ("circle", "circle", "triangle")])
def test_ids_by_number_where_names_differ(names):
    dataset = Categories((10, 20, 30), names)
    assert categories_as_annotated(MODEL, dataset) == dataset


def test_classes_that_would_be_taken_for_each_other():
    with pytest.raises(InputError, match="3 classes, triangle, circle, b: some are .* and square matches no name"):
        categories_as_annotated(MODEL, Categories((1, 2, 3), ("triangle", "circle", "b")))
    with pytest.raises(InputError, match="knows 3 classes, circle, .* have 6 classes, a, b, c, d, e and 1 more: they"):
        categories_as_annotated(MODEL, Categories(tuple(range(6)), tuple("abcdef")))
