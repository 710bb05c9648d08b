"""A few images of a COCO annotation file as a file of their own, to try a training run on."""

import json
from pathlib import Path

from backbones import InputError
from backbones.utils.files import written_whole


def write_subset(source: str | Path, output: str | Path, *, num_images: int) -> int:
    """Write the annotations of ``num_images`` images, spread evenly over those that have any, in the file's order.

    Categories, licenses and info stay as they are, so that class indices do.

    Args:
        source: a COCO annotation file.
        output: the file to write.
        num_images: 1 or more; all images with annotations where there are fewer.

    Returns:
        The number of images written.

    Raises:
        InputError: for a file that is missing or no COCO annotation file, a number below 1, or an output that is the
            source.
    """
    if num_images < 1:
        raise InputError(f"the number of images is {num_images}: it is 1 or more")
    if Path(output).resolve() == Path(source).resolve():
        raise InputError(f"{output} is the source: name another file")
    try:
        dataset = json.loads(Path(source).read_text())
        annotated = {annotation["image_id"] for annotation in dataset["annotations"]}
        images = [image for image in dataset["images"] if image["id"] in annotated]
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{source} is not JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise InputError(f"{source} is not a COCO annotation file: {type(error).__name__} {error}") from error
    if not images:
        raise InputError(f"{source} has no image with an annotation")
    count = min(num_images, len(images))
    kept = [images[index * len(images) // count] for index in range(count)]
    ids = {image["id"] for image in kept}
    subset = dataset | {
        "images": kept,
        "annotations": [annotation for annotation in dataset["annotations"] if annotation["image_id"] in ids],
    }
    with written_whole(Path(output)) as partial:
        partial.write_text(json.dumps(subset))
    return count
