"""Outputs of the official implementations in ``tests/golden``, and the weights that they were computed with."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).with_name("golden")


def golden(name: str) -> dict:
    """Return the content of a golden file."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def golden_state_dict(reference: dict) -> dict[str, torch.Tensor]:
    """Return the official checkpoint. Every weight is a function of its name (``tests/golden/README.md``)."""
    weights = {}
    for name, entry in reference["state_dict"].items():
        if name in reference["integer_buffers_not_filled"]:
            weights[name] = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
            continue
        if name == "pos_emb.inv_freq":
            channels = 2 * entry["shape"][0]
            weights[name] = 1 / 10000 ** (torch.arange(0, channels, 2) / channels)
            continue
        source = reference["aliases"].get(name, name)
        weights[name] = golden_values(source, entry["shape"])
    return weights


def golden_images(reference: dict) -> torch.Tensor:
    """Return the input images, in float64, so that the result does not depend on the processor."""
    entry = reference["input"]
    images = np.random.RandomState(entry["seed"]).standard_normal(entry["shape"])
    return torch.from_numpy(images.astype(np.float32)).double()


def golden_ids(reference: dict) -> torch.Tensor:
    """Return the token ids (B, N) of a sequence model: ``(7 i i + 3 i + 5 b) mod V`` at position i of sequence b."""
    entry = reference["input"]
    assert entry["ids"] == f"(7 i i + 3 i + 5 b) mod {reference['config']['vocabulary']}"
    batch, length = entry["shape"]
    position, sequence = torch.arange(length), torch.arange(batch)[:, None]
    return (7 * position * position + 3 * position + 5 * sequence) % reference["config"]["vocabulary"]


def assert_close_to_golden(output: torch.Tensor, expected: dict, *, correction: int = 0) -> None:
    """Check the shape, and that each listed value is within 2e-4 of the largest one (``tests/golden/README.md``).

    Args:
        output: The output of a model.
        expected: The entry of a golden file.
        correction: Argument of ``torch.std``: 1 for models on sequences.
    """
    assert list(output.shape) == expected["shape"]
    values = output.reshape(-1)[torch.tensor(expected["index"])].double()
    difference = (values - torch.tensor(expected["value"], dtype=torch.float64)).abs().max().item()
    assert difference <= 2e-4 * expected["max"]
    assert abs(output.double().std(correction=correction).item() - expected["std"]) <= 2e-4 * expected["max"]


def golden_values(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return the float32 values of an official parameter."""
    seed = zlib.crc32(name.encode()) % 2**32
    z = np.random.RandomState(seed).standard_normal(shape).astype(np.float32)
    last = name.split(".")[-1]
    if last == "running_var":
        z = 1 + 0.1 * np.abs(z)
    elif last == "weight":
        z = 1 + 0.1 * z if z.ndim == 1 else z / np.sqrt(np.prod(z.shape[1:])).astype(np.float32)
    else:
        z = (0.5 if "offset" in name and last == "bias" else 0.1) * z
    return torch.from_numpy(z)
