"""The reference equals loops over single tokens, written from the definitions in the paper."""

import math

import pytest
import torch

from backbones.attention import reference
from backbones.attention.chunks import MODES
from tests.backbones.helpers import attention_inputs

WINDOW = 3


def chunk_step(query: int, key: int, size: int, mode: str) -> int | None:
    """Return the distance of the key's chunk behind the query's chunk along one axis, or None if the key is masked."""
    step = key // WINDOW - query // WINDOW
    if mode == "exact":
        return step if abs(key - query) <= WINDOW else None
    num_chunks = math.ceil(size / WINDOW)
    if mode == "cyclic" and num_chunks >= 3:
        step = {0: 0, 1: 1, num_chunks - 1: -1}.get(step % num_chunks)
    return step if step in (-1, 0, 1) else None


def attend(inputs: dict, head: int, row: int, col: int, mode: str) -> torch.Tensor:
    """Return the output of one query, from exponentials of single products."""
    height, width, channels = inputs["query"].shape[2:]
    query, scores, values = inputs["query"][0, head, row, col], [], []
    position = row % WINDOW * WINDOW + col % WINDOW
    for key_row in range(height):
        for key_col in range(width):
            down, right = chunk_step(row, key_row, height, mode), chunk_step(col, key_col, width, mode)
            if down is None or right is None:
                continue
            slot_row, slot_col = (down + 1) * WINDOW + key_row % WINDOW, (right + 1) * WINDOW + key_col % WINDOW
            bias = inputs["local_bias"][head, position, slot_row * 3 * WINDOW + slot_col]
            scores.append(query.dot(inputs["key"][0, head, key_row, key_col]) / math.sqrt(channels) + bias)
            values.append(inputs["value"][0, head, key_row, key_col])
    for token in range(inputs["global_key"].shape[2] if "global_key" in inputs else 0):
        product = query.dot(inputs["global_key"][0, head, token]) / math.sqrt(channels)
        scores.append(product + inputs["global_bias"][head, token])
        values.append(inputs["global_value"][0, head, token])
    weights = torch.stack(scores).exp()
    return (weights[:, None] * torch.stack(values)).sum(0) / weights.sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("height, width, num_global", [(2, 1, 2), (3, 6, 0), (7, 4, 2), (2, 10, 0), (9, 8, 2)])
def test_equals_loops_over_tokens(mode, height, width, num_global):
    biases = {"local_bias": True, "global_bias": num_global > 0}
    inputs = attention_inputs(height, width, num_global=num_global, batch=1, **biases)
    output = reference.sliding_chunk_attention(**inputs, chunk_size=WINDOW, mode=mode)
    for head in range(output.shape[1]):
        for row in range(height):
            for col in range(width):
                expected = attend(inputs, head, row, col, mode)
                torch.testing.assert_close(output[0, head, row, col], expected, atol=1e-12, rtol=1e-12)
