"""A model's classes as the annotation file of the images numbers them."""

from backbones import InputError
from projects_vil.checkpoint import Categories, match_classes


def categories_as_annotated(model: Categories, dataset: Categories) -> Categories:
    """A model's classes with the dataset's ids and names: by name where the dataset has them all, or else by number.

    Args:
        model: in the order of its outputs.
        dataset: of the annotation file.

    Raises:
        InputError: where their numbers differ, or some names are in another order and others match nothing: by number
            classes would be taken for each other.
    """
    if len(model.names) != len(dataset.names):
        raise InputError(
            f"the model knows {_listed(model.names)}, and the annotations have {_listed(dataset.names)}: they are for "
            "another model"
        )
    places = match_classes(model.names, dataset.names)
    if len(places) < len(model.names):
        if any(index != place for index, place in places.items()):
            unmatched = next(name for index, name in enumerate(model.names) if index not in places)
            raise InputError(
                f"the model knows {_listed(model.names)}, and the annotations have {_listed(dataset.names)}: some are "
                f"in another order, and {unmatched} matches no name in them"
            )
        return dataset
    order = [places[index] for index in range(len(places))]
    colors = dataset.colors and [dataset.colors[place] for place in order]
    return Categories(tuple(dataset.ids[place] for place in order), model.names, colors)


def _listed(classes: tuple[str, ...]) -> str:
    more = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
    return f"{len(classes)} classes, {', '.join(classes[:5])}{more}"
