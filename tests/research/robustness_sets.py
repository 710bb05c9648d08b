"""Small sets in the layouts of the published ones, with JPEGs of noise."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from research.robustness.sets import CORRUPTIONS

# Images of the classes 0, 1, 6, 11 and 13. ImageNet-A has the last three, ImageNet-R the last four.
TENCH, GOLDFISH, STINGRAY, GOLDFINCH, JUNCO = "n01440764", "n01443537", "n01498041", "n01531178", "n01534433"


def write_image(path: Path, seed: int, size: tuple[int, int] = (56, 72)) -> Path:
    """A JPEG of coarse noise, height by width in pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size[::-1], Image.Resampling.BICUBIC).save(path, quality=90, format="JPEG")
    return path


def write_val(data: Path) -> None:
    """Three images of val: numbers 1 and 3 of one class, 2 of another, so that their order by folder is another."""
    for seed, (wordnet_id, number) in enumerate([(TENCH, 2), (STINGRAY, 1), (STINGRAY, 3)]):
        write_image(data / "val" / wordnet_id / f"ILSVRC2012_val_{number:08d}.JPEG", seed)


def write_real(data: Path, labels: dict[int, list[int]]) -> None:
    """real.json with labels of some images by number; the others have none."""
    (data / "real.json").write_text(json.dumps([labels.get(number, []) for number in range(1, 50_001)]))


def write_v2(data: Path, name: str = "matched-frequency") -> None:
    for seed, number in enumerate((0, 6, 11)):
        write_image(data / f"imagenetv2-{name}-format-val" / str(number) / f"{seed}.jpeg", seed)


def write_wordnet(data: Path, folder: str, *wordnet_ids: str) -> None:
    for seed, wordnet_id in enumerate(wordnet_ids):
        write_image(data / folder / wordnet_id / f"{seed}.jpg", seed)
    (data / folder / "README.txt").write_text("As the archives of ImageNet-A and -R have it.\n")


def write_corruptions(data: Path, corruptions=CORRUPTIONS, severities=(1, 2, 3, 4, 5)) -> None:
    for corruption in corruptions:
        for severity in severities:
            root = data / "imagenet-c" / corruption / str(severity)
            write_image(root / TENCH / "ILSVRC2012_val_00000002.JPEG", severity, (28, 28))


def write_in9(data: Path, name: str, labels: dict[int, int]) -> None:
    """A dog and a fish, and the file by which classes 0 to 999 belong to the nine."""
    for seed, folder in enumerate(("00_dog", "08_fish")):
        write_image(data / "bg_challenge" / name / "val" / folder / f"{seed}.JPEG", seed, (28, 28))
    (data / "in_to_in9.json").write_text(json.dumps({str(number): labels.get(number, -1) for number in range(1000)}))


def write_all(data: Path) -> Path:
    """All twelve sets."""
    write_val(data)
    write_real(data, {1: [13, 900], 2: [0, 1], 3: []})
    for name in ("matched-frequency", "threshold0.7", "top-images"):
        write_v2(data, name)
    write_wordnet(data, "imagenet-a", STINGRAY, GOLDFINCH)
    write_wordnet(data, "imagenet-r", GOLDFISH, STINGRAY)
    write_wordnet(data, "sketch", TENCH, JUNCO)
    for name in ("original", "mixed_same", "mixed_rand"):
        write_in9(data, name, {0: 8, 1: 8, 11: 0})
    write_corruptions(data)
    return data
