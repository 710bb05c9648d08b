"""Write a COCO annotation file with a few images of another file, for example to test whether a detector overfits.

The images are at even intervals among the images with annotations. The categories stay the same.

Example:
    python examples/make_coco_subset.py datasets/coco/annotations/instances_train2017.json eight.json --num-images 8
"""

import json

from backbones.errors import ConfigError
from vil.arguments import ToolParser, existing_path, output_file, positive, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("source", type=existing_path, metavar="SOURCE", help="COCO annotation file")
    parser.add_argument("output", type=output_file, metavar="OUTPUT", help="annotation file to write; must not exist")
    parser.add_argument("--num-images", type=positive, default=8, metavar="N", help="number of images (default 8)")
    args = parser.parse_args()

    from backbones.files import write_text
    from projects_vil.data.readers import read_coco

    dataset = read_coco(args.source)
    annotated = {annotation["image_id"] for annotation in dataset.get("annotations", ())}
    images = [image for image in dataset["images"] if image["id"] in annotated]
    if not images:
        raise ConfigError(f"'{args.source}' has no image with an annotation. Use a file with annotations.")
    count = min(args.num_images, len(images))
    chosen = [images[index * len(images) // count] for index in range(count)]
    ids = {image["id"] for image in chosen}
    annotations = [annotation for annotation in dataset["annotations"] if annotation["image_id"] in ids]
    write_text(args.output, json.dumps(dataset | {"images": chosen, "annotations": annotations}))
    fewer = f" (--num-images is {args.num_images}, but no other images have annotations)"
    print(f"wrote {args.output}: {count} images{fewer * (count < args.num_images)}")


if __name__ == "__main__":
    run_tool(main)
