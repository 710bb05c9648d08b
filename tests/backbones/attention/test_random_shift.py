"""Random-shift training of ViL: equal to the reference, linear in memory, only in training, equal in all processes."""

import functools

import pytest
import torch

from backbones.attention import blocked, reference
from backbones.attention.sliding_chunk import (
    MODES,
    SHIFTS,
    SlidingChunkAttention,
    sample_shifts,
    sliding_chunk_attention,
)
from tests.backbones.helpers import (
    LargestTensor,
    assert_all_close,
    assert_padding_is_hidden_in_half_precision,
    attention_inputs,
    mark_as_on_a_gpu,
    outputs_and_gradients,
    random_images,
    randomise,
    small_vil,
)

WINDOW = 3
# Less than a chunk, two by two, three by three, one axis of one and one of two chunks, none of them whole, a strip.
SIZES = [(2, 1), (6, 5), (9, 9), (3, 11), (12, 6), (7, 11), (1, 20)]
EXTRAS = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1), (2, 0, 1), (2, 1, 0)]


def options(shift, mode="zero_pad"):
    return {"window_size": WINDOW, "mode": mode, "shift": shift}


def inputs_for(height, width, extra, **others):
    num_global, local_bias, global_bias = extra
    return attention_inputs(
        height, width, num_global=num_global, local_bias=bool(local_bias), global_bias=bool(global_bias), **others
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shift", SHIFTS, ids=str)
@pytest.mark.parametrize("height, width", SIZES)
def test_equals_the_reference(height, width, shift, mode):
    # Every size and every shift meets all of them.
    extra = EXTRAS[(SIZES.index((height, width)) + SHIFTS.index(shift)) % len(EXTRAS)]
    inputs = inputs_for(height, width, extra)
    expected = outputs_and_gradients(reference.sliding_chunk_attention, inputs, **options(shift, mode))
    actual = outputs_and_gradients(sliding_chunk_attention, inputs, **options(shift, mode))
    assert_all_close(actual, expected, tolerance=1e-11)


def test_a_token_sees_its_chunk_one_neighbour_and_the_global_tokens():
    """By hand: the chunk to the right of the own, of 2 x 3 chunks; at the right border there is none."""
    query, key = torch.zeros(2, 1, 1, 6, 9, 2)
    value = torch.arange(54.0).view(1, 1, 6, 9, 1).expand(-1, -1, -1, -1, 2)
    global_key, global_value = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1, 2), 1000.0)
    output = sliding_chunk_attention(
        query, key, value, global_key=global_key, global_value=global_value, **options((0, 1))
    )[0, 0, :, :, 0]
    rows = [9 * row + torch.arange(9.0) for row in range(3)]
    own = sum(row[:3].sum() for row in rows), sum(row[3:6].sum() for row in rows), sum(row[6:].sum() for row in rows)
    torch.testing.assert_close(output[1, 2], (own[0] + own[1] + 1000) / 19)
    torch.testing.assert_close(output[0, 5], (own[1] + own[2] + 1000) / 19)
    torch.testing.assert_close(output[2, 8], (own[2] + 1000) / 10)


@pytest.mark.parametrize("block_scores", [1, 700, 20000])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_blocks_of_any_size_give_the_same(monkeypatch, block_scores, has_kernel):
    monkeypatch.setitem(blocked.BLOCK_SCORES, "cpu", block_scores)
    if not has_kernel:
        monkeypatch.setattr(blocked, "_CPU_KERNEL", None)
    inputs = inputs_for(7, 11, (2, 1, 1), batch=3)
    expected = outputs_and_gradients(reference.sliding_chunk_attention, inputs, **options((-1, 1)))
    actual = outputs_and_gradients(sliding_chunk_attention, inputs, **options((-1, 1)))
    assert_all_close(actual, expected, tolerance=1e-11)


def test_the_marks_of_a_gpu_give_the_same(monkeypatch):
    monkeypatch.setattr("backbones.attention.sliding_chunk.mask_channels", mark_as_on_a_gpu)
    inputs = inputs_for(7, 11, (1, 1, 1))
    expected = outputs_and_gradients(reference.sliding_chunk_attention, inputs, **options((1, 0)))
    assert_all_close(
        outputs_and_gradients(sliding_chunk_attention, inputs, **options((1, 0))), expected, tolerance=1e-11
    )


def test_gradcheck():
    inputs = {name: 0.5 * x for name, x in inputs_for(4, 7, (1, 1, 1), batch=1, heads=1, channels=2).items()}

    def run(*tensors):
        return sliding_chunk_attention(**dict(zip(inputs, tensors, strict=True)), **options((0, 1)))

    leaves = tuple(x.requires_grad_() for x in inputs.values())
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [True, False])
def test_padding_is_hidden_in_half_precision(dtype, autocast):
    inputs = inputs_for(4, 8, (1, 1, 1), channels=64)
    functions = (
        functools.partial(function, **options((1, 1)))
        for function in (sliding_chunk_attention, reference.sliding_chunk_attention)
    )
    assert_padding_is_hidden_in_half_precision(*functions, inputs, dtype=dtype, autocast=autocast)


@pytest.mark.parametrize("mode", MODES)
def test_never_reads_beyond_what_it_sees(mode):
    """The memory around the feature map holds NaNs, which would show in the output if they were read."""
    inputs = inputs_for(4, 8, (1, 0, 0))
    expected = sliding_chunk_attention(**inputs, **options((-1, -1), mode))
    for name in ("query", "key", "value"):
        wide = torch.full((2, 2, 9, 12, 4), float("nan"), dtype=torch.float64)
        wide[:, :, 2:6, 3:11] = inputs[name]
        inputs[name] = wide[:, :, 2:6, 3:11]
    assert torch.equal(sliding_chunk_attention(**inputs, **options((-1, -1), mode)), expected)


def test_memory_is_linear_in_the_tokens():
    def largest(height, width):
        with LargestTensor() as seen:
            outputs_and_gradients(
                sliding_chunk_attention, inputs_for(height, width, (1, 1, 1), batch=1), **options((0, 1))
            )
        return seen.numel

    assert largest(36, 48) <= 4.2 * largest(18, 24)


def test_keys_of_each_chunk_are_not_kept():
    inputs, saved = inputs_for(23, 31, (1, 1, 1), batch=1, channels=8), {}
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x}) or x, lambda x: x):
        sliding_chunk_attention(**leaves, **options((0, 1)))
    kept = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved.values()}.values())
    given = sum(x.numel() for name, x in leaves.items() if "bias" not in name)
    # The output and a sum for each query, of whole chunks; of the bias the parts that were seen.
    assert kept <= 8 * (given + 2 * 24 * 33 * 9 + inputs["local_bias"].numel())


# -- in a model ------------------------------------------------------------------------------------


def test_evaluation_sees_all_chunks():
    module = randomise(SlidingChunkAttention(8, num_heads=2, window_size=WINDOW, relative_bias=True)).double()
    tokens, global_tokens = random_images(2, 7, 11, 8), random_images(2, 1, 8)
    expected = module(tokens, global_tokens)[0]
    module.shift = (0, 1)
    shifted = module(tokens, global_tokens)[0]
    assert not torch.allclose(shifted, expected)
    torch.testing.assert_close(module.eval()(tokens, global_tokens)[0], expected)
    check = randomise(
        SlidingChunkAttention(8, num_heads=2, window_size=WINDOW, relative_bias=True, backend="reference")
    ).double()
    check.shift = (0, 1)
    torch.testing.assert_close(shifted, check(tokens, global_tokens)[0])


def test_shifts_depend_on_the_seed_and_the_layer():
    model, other = small_vil(), small_vil()
    sampled = []
    for seed in range(40):
        assert sample_shifts(model, seed=seed) == sample_shifts(other, seed=seed) > 1
        sampled.append([m.shift for m in model.modules() if isinstance(m, SlidingChunkAttention)])
        assert sampled[-1] == [m.shift for m in other.modules() if isinstance(m, SlidingChunkAttention)]
    assert any(len(set(shifts)) > 1 for shifts in sampled)
    for of_layer in zip(*sampled, strict=True):
        assert set(of_layer) == set(SHIFTS)
    sample_shifts(model, seed=None)
    assert {m.shift for m in model.modules() if isinstance(m, SlidingChunkAttention)} == {None}


def test_sampling_leaves_the_global_generator_unchanged():
    model = small_vil()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    sample_shifts(model, seed=7)
    assert torch.equal(torch.rand(2), expected)


def test_activation_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = small_vil(activation_checkpointing=checkpointing).train()
        sample_shifts(model, seed=2)
        sum(x.square().mean() for x in model(random_images(1, 3, 61, 83)).values()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_all_close(gradients[1], gradients[0], tolerance=1e-12)


def test_no_images():
    inputs = inputs_for(4, 7, (1, 1, 1), batch=1)
    inputs = {name: x[:0] if "bias" not in name else x for name, x in inputs.items()}
    actual = outputs_and_gradients(sliding_chunk_attention, inputs, **options((0, 1)))
    assert actual["output"].shape == (0, 2, 4, 7, 4)
    assert not actual["gradient of local_bias"].any()
