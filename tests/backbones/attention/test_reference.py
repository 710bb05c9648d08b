"""The reference against loops over single tokens, written from the definitions of the paper."""

import math

import pytest
import torch

from backbones.attention import reference
from backbones.attention.sliding_chunk import MODES
from tests.backbones.helpers import attention_inputs

WINDOW = 3


def chunk_step(query: int, key: int, size: int, mode: str) -> int | None:
    """Along one axis: how many chunks the key's lies behind the query's, or None where the key is not seen."""
    step = key // WINDOW - query // WINDOW
    if mode == "exact":
        return step if abs(key - query) <= WINDOW else None
    num_chunks = math.ceil(size / WINDOW)
    if mode == "cyclic" and num_chunks >= 3:
        step = {0: 0, 1: 1, num_chunks - 1: -1}.get(step % num_chunks)
    return step if step in (-1, 0, 1) else None


def seen_keys(row: int, col: int, height: int, width: int, mode: str) -> dict[tuple[int, int], int]:
    """Each key that the query at (row, col) sees, once, with its position in the query's 3w x 3w neighbourhood."""
    seen = {}
    for key_row in range(height):
        for key_col in range(width):
            down, right = chunk_step(row, key_row, height, mode), chunk_step(col, key_col, width, mode)
            if down is not None and right is not None:
                slot_row, slot_col = (down + 1) * WINDOW + key_row % WINDOW, (right + 1) * WINDOW + key_col % WINDOW
                seen[key_row, key_col] = slot_row * 3 * WINDOW + slot_col
    return seen


def attend(inputs: dict, image: int, head: int, row: int, col: int, mode: str) -> torch.Tensor:
    """The output of one query, from exponentials of single products."""
    height, width, channels = inputs["query"].shape[2:]
    query = inputs["query"][image, head, row, col]
    position = row % WINDOW * WINDOW + col % WINDOW
    scores, values = [], []
    for (key_row, key_col), slot in seen_keys(row, col, height, width, mode).items():
        score = query.dot(inputs["key"][image, head, key_row, key_col]) / math.sqrt(channels)
        if "local_bias" in inputs:
            score = score + inputs["local_bias"][head, position, slot]
        scores.append(score)
        values.append(inputs["value"][image, head, key_row, key_col])
    for token in range(inputs["global_key"].shape[2] if "global_key" in inputs else 0):
        score = query.dot(inputs["global_key"][image, head, token]) / math.sqrt(channels)
        if "global_bias" in inputs:
            score = score + inputs["global_bias"][head, token]
        scores.append(score)
        values.append(inputs["global_value"][image, head, token])
    weights = torch.stack(scores).exp()
    return (weights[:, None] * torch.stack(values)).sum(0) / weights.sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("height, width", [(2, 1), (3, 6), (7, 4), (2, 10), (9, 8)])
@pytest.mark.parametrize("num_global", [0, 2])
def test_equals_loops_over_tokens(mode, height, width, num_global):
    biases = {"local_bias": True, "global_bias": num_global > 0}
    inputs = attention_inputs(height, width, num_global=num_global, heads=1 + (num_global > 0), batch=1, **biases)
    output = reference.sliding_chunk_attention(**inputs, window_size=WINDOW, mode=mode)
    for head in range(output.shape[1]):
        for row in range(height):
            for col in range(width):
                expected = attend(inputs, 0, head, row, col, mode)
                torch.testing.assert_close(output[0, head, row, col], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "mode, size, expected",
    [
        # w = 3: positions 0-2, 3-5, 6-8, 9-10 are the chunks of 11 tokens
        ("zero_pad", 11, {0: range(6), 4: range(9), 10: range(6, 11)}),
        ("exact", 11, {0: range(4), 4: range(1, 8), 10: range(7, 11)}),
        ("cyclic", 11, {0: [0, 1, 2, 3, 4, 5, 9, 10], 4: range(9), 10: [0, 1, 2, 6, 7, 8, 9, 10]}),
        ("cyclic", 8, {0: range(8), 4: range(8), 7: range(8)}),
        ("cyclic", 5, {0: range(5), 4: range(5)}),
    ],
)
def test_sees_the_right_tokens_along_an_axis(mode, size, expected):
    """By hand: a value of 1 at one key shows in the output of the queries that see it."""
    zeros = torch.zeros(1, 1, 1, size, 1, dtype=torch.float64)
    seen = {query: [] for query in expected}
    for key in range(size):
        value = zeros.clone()
        value[..., key, :] = 1
        output = reference.sliding_chunk_attention(zeros, zeros, value, window_size=WINDOW, mode=mode).flatten()
        for query in expected:
            if output[query] > 0:
                assert output[query].item() == pytest.approx(1 / len(expected[query]))
                seen[query].append(key)
    assert seen == {query: list(keys) for query, keys in expected.items()}


def test_attention_is_a_softmax_of_scaled_products():
    inputs = attention_inputs(2, 3, batch=1, heads=1)
    query, key, value = (inputs[name].flatten(2, 3) for name in ("query", "key", "value"))
    bias = torch.linspace(-1, 1, 36, dtype=torch.float64).view(1, 6, 6)
    output = reference.attention(query, key, value, bias=bias)
    for row in range(6):
        weights = torch.stack([(query[0, 0, row].dot(key[0, 0, i]) / 2 + bias[0, row, i]).exp() for i in range(6)])
        expected = sum(weights[i] / weights.sum() * value[0, 0, i] for i in range(6))
        torch.testing.assert_close(output[0, 0, row], expected, atol=1e-12, rtol=1e-12)
