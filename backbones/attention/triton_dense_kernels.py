"""Triton kernels for attention of a feature map to itself and to global tokens, with a learned bias.

:mod:`.triton_dense` launches them. The import needs triton.

The bias is never expanded to all pairs of tokens. The kernels read it from a table of all offsets. The place of a token
is the index of its offset to the first token: place = row * (2 * W - 1) + column. The bias of a query and a key is at
``query place - key place + constant``, so one addition per score finds it. A table has three parts:

- FIRST = (H - 1) * (2 * W - 1) + W values of -inf, one for each place. A key beyond the feature map reads these, so
  that scores need no mask.
- The biases of all offsets, (2 * H - 1) * (2 * W - 1) values.
- The biases of the G global keys.

Scores, log-sum-exps and the table are to base 2. One program writes each value. There are no atomic additions, so
results do not vary from run to run. Offsets into feature maps have 64 bits.

Shapes: B images, M heads, N = H * W tokens, D channels per head, G global tokens. Queries and the gradient of the
output are (B, M, N, D), keys and values (B, M, G + N, D). Their strides are named after the axes b, m, n, d. Outputs
lie in memory as (B, N, M, D) or (B, G + N, M, D), and log-sum-exps as (B, M, N).
"""

import triton
import triton.language as tl

from backbones.attention.triton_kernels import LOG2_E, LOWEST, _add_products, _attend, _load, _products, _store

# One compiled kernel is used for all feature maps.
SIZES = ("batches", "height", "width", "rows")


@triton.jit
def _table_sizes(height, width):
    """Return the number of hidden values of a table, and the number of the values before the global keys."""
    first = (height - 1) * (2 * width - 1) + width
    return first, first + (2 * height - 1) * (2 * width - 1)


@triton.jit
def _scores(own, seen, own_term, seen_term, table, SCALE: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Return the scores (own, seen) of a block. The sum of two terms is the index of the bias in the head's table."""
    bias = tl.load(table + (own_term[:, None] + seen_term[None, :]))
    return _products(own, seen, ACC_DTYPE) * (SCALE * LOG2_E) + bias


@triton.jit
def _local_terms(places, index, is_token, height, width):
    """Return the terms of keys of the feature map. Keys beyond it are hidden."""
    first, _ = _table_sizes(height, width)
    place = tl.load(places + index, mask=is_token, other=0)
    return tl.where(is_token, 2 * first - 1 - place, 0)


@triton.jit(do_not_specialize=SIZES)
def table_kernel(
    offset_bias, global_bias, table, places,
    offset_bias_m, offset_bias_h, offset_bias_w, global_bias_m, global_bias_g,
    height, width,
    GLOBALS: tl.constexpr, BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Write the table of each head, and the places of all tokens. Grid: blocks of the table, heads."""
    head = tl.program_id(1)
    first, end = _table_sizes(height, width)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_local = (index >= first) & (index < end)
    offset = tl.where(is_local, index - first, 0)
    row, col = offset // (2 * width - 1), offset % (2 * width - 1)
    local = offset_bias + head * offset_bias_m + row * offset_bias_h + col * offset_bias_w
    value = tl.load(local, mask=is_local, other=float("-inf")).to(ACC_DTYPE)
    is_global = (index >= end) & (index < end + GLOBALS)
    if global_bias is None:
        value = tl.where(is_global, 0.0, value)
    else:
        bias = global_bias + head * global_bias_m + (index - end) * global_bias_g
        value = tl.where(is_global, tl.load(bias, mask=is_global, other=0.0).to(ACC_DTYPE), value)
    tl.store(table + head.to(tl.int64) * (end + GLOBALS) + index, value * LOG2_E, mask=index < end + GLOBALS)
    place = index // width * (2 * width - 1) + index % width
    tl.store(places + index, place, mask=(head == 0) & (index < height * width))


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query, key, value, table, places, output, lse,
    query_b, query_m, query_n, query_d,
    key_b, key_m, key_n, key_d,
    value_b, value_m, value_n, value_d,
    height, width,
    GLOBALS: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr, QUERIES_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr, GLOBALS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute outputs and log-sum-exps. Grid: blocks of queries, heads, images."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, tokens = tl.num_programs(1), height * width
    first, end = _table_sizes(height, width)
    query += batch * query_b + head * query_m
    key += batch * key_b + head * key_m
    value += batch * value_b + head * value_m
    table += head * (end + GLOBALS)
    token = tl.program_id(0) * QUERIES_BLOCK + tl.arange(0, QUERIES_BLOCK)
    is_token = token < tokens
    place = tl.load(places + token, mask=is_token, other=0)
    q = _load(query, token.to(tl.int64) * query_n, is_token, query_d, CHANNELS, CHANNELS_BLOCK)

    largest = tl.full([QUERIES_BLOCK], LOWEST, ACC_DTYPE)
    total = tl.zeros([QUERIES_BLOCK], ACC_DTYPE)
    result = tl.zeros([QUERIES_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    if GLOBALS > 0:
        for start in range(0, GLOBALS, GLOBALS_BLOCK):
            index = start + tl.arange(0, GLOBALS_BLOCK)
            is_key = index < GLOBALS
            k = _load(key, index.to(tl.int64) * key_n, is_key, key_d, CHANNELS, CHANNELS_BLOCK)
            v = _load(value, index.to(tl.int64) * value_n, is_key, value_d, CHANNELS, CHANNELS_BLOCK)
            scores = _scores(q, k, place * 0, tl.where(is_key, end + index, 0), table, SCALE, ACC_DTYPE)
            largest, total, result = _attend(scores, v, largest, total, result, ACC_DTYPE)
    for start in range(0, tokens, KEYS_BLOCK):
        index = start + tl.arange(0, KEYS_BLOCK)
        is_key = index < tokens
        number = GLOBALS + index.to(tl.int64)
        k = _load(key, number * key_n, is_key, key_d, CHANNELS, CHANNELS_BLOCK)
        v = _load(value, number * value_n, is_key, value_d, CHANNELS, CHANNELS_BLOCK)
        scores = _scores(q, k, place, _local_terms(places, index, is_key, height, width), table, SCALE, ACC_DTYPE)
        largest, total, result = _attend(scores, v, largest, total, result, ACC_DTYPE)

    number = (batch * tokens + token) * heads + head
    _store(output, result / total[:, None], number * CHANNELS, is_token, CHANNELS, CHANNELS_BLOCK)
    tl.store(lse + (batch * heads + head) * tokens + token, largest + tl.log2(total), mask=is_token)


@triton.jit(do_not_specialize=SIZES)
def query_grad_kernel(
    query, key, value, table, places, output, lse, grad, query_grad, delta, global_bias_partial,
    query_b, query_m, query_n, query_d,
    key_b, key_m, key_n, key_d,
    value_b, value_m, value_n, value_d,
    grad_b, grad_m, grad_n, grad_d,
    height, width,
    GLOBALS: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr, QUERIES_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr, GLOBALS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, and delta, the product of the output and its gradient. Grid: as forward.

    The gradients of the biases of global keys are summed over a block of queries: (blocks, B, M, G).
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, tokens = tl.num_programs(1), height * width
    first, end = _table_sizes(height, width)
    query += batch * query_b + head * query_m
    key += batch * key_b + head * key_m
    value += batch * value_b + head * value_m
    grad += batch * grad_b + head * grad_m
    table += head * (end + GLOBALS)
    token = tl.program_id(0) * QUERIES_BLOCK + tl.arange(0, QUERIES_BLOCK)
    is_token = token < tokens
    place = tl.load(places + token, mask=is_token, other=0)
    q = _load(query, token.to(tl.int64) * query_n, is_token, query_d, CHANNELS, CHANNELS_BLOCK)
    do = _load(grad, token.to(tl.int64) * grad_n, is_token, grad_d, CHANNELS, CHANNELS_BLOCK)
    number = (batch * tokens + token) * heads + head
    out = _load(output, number * CHANNELS, is_token, 1, CHANNELS, CHANNELS_BLOCK)
    delta_i = tl.sum(do.to(ACC_DTYPE) * out.to(ACC_DTYPE), 1)
    row = (batch * heads + head) * tokens + token
    tl.store(delta + row, delta_i, mask=is_token)
    lse_i = tl.load(lse + row, mask=is_token, other=float("inf"))

    dq = tl.zeros([QUERIES_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    if GLOBALS > 0:
        for start in range(0, GLOBALS, GLOBALS_BLOCK):
            index = start + tl.arange(0, GLOBALS_BLOCK)
            is_key = index < GLOBALS
            k = _load(key, index.to(tl.int64) * key_n, is_key, key_d, CHANNELS, CHANNELS_BLOCK)
            v = _load(value, index.to(tl.int64) * value_n, is_key, value_d, CHANNELS, CHANNELS_BLOCK)
            scores = _scores(q, k, place * 0, tl.where(is_key, end + index, 0), table, SCALE, ACC_DTYPE)
            weights = tl.exp2(scores - lse_i[:, None])
            score_grads = weights * (_products(do, v, ACC_DTYPE) - delta_i[:, None])
            dq = _add_products(dq, score_grads, k, ACC_DTYPE)
            if global_bias_partial is not None:
                block = (tl.program_id(0) * tl.num_programs(2) + batch) * heads + head
                tl.store(global_bias_partial + block * GLOBALS + index, tl.sum(score_grads, 0), mask=is_key)
    for start in range(0, tokens, KEYS_BLOCK):
        index = start + tl.arange(0, KEYS_BLOCK)
        is_key = index < tokens
        key_number = GLOBALS + index.to(tl.int64)
        k = _load(key, key_number * key_n, is_key, key_d, CHANNELS, CHANNELS_BLOCK)
        v = _load(value, key_number * value_n, is_key, value_d, CHANNELS, CHANNELS_BLOCK)
        scores = _scores(q, k, place, _local_terms(places, index, is_key, height, width), table, SCALE, ACC_DTYPE)
        weights = tl.exp2(scores - lse_i[:, None])
        dq = _add_products(dq, weights * (_products(do, v, ACC_DTYPE) - delta_i[:, None]), k, ACC_DTYPE)
    _store(query_grad, dq * SCALE, number * CHANNELS, is_token, CHANNELS, CHANNELS_BLOCK)


@triton.jit(do_not_specialize=SIZES)
def key_grad_kernel(
    query, key, value, table, places, lse, delta, grad, key_grad, value_grad,
    query_b, query_m, query_n, query_d,
    key_b, key_m, key_n, key_d,
    value_b, value_m, value_n, value_d,
    grad_b, grad_m, grad_n, grad_d,
    height, width,
    GLOBALS: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr, QUERIES_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values. Grid: blocks of local keys, then of global keys; heads; images."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, tokens = tl.num_programs(1), height * width
    first, end = _table_sizes(height, width)
    query += batch * query_b + head * query_m
    key += batch * key_b + head * key_m
    value += batch * value_b + head * value_m
    grad += batch * grad_b + head * grad_m
    lse += (batch * heads + head) * tokens
    delta += (batch * heads + head) * tokens
    table += head * (end + GLOBALS)
    index = tl.program_id(0) * KEYS_BLOCK + tl.arange(0, KEYS_BLOCK)
    is_key = index < tokens
    term = _local_terms(places, index, is_key, height, width)
    number = GLOBALS + index
    is_local = 1
    if GLOBALS > 0:
        # The bias of a global key does not depend on the place of the query.
        is_local = (tl.program_id(0) * KEYS_BLOCK < tokens).to(tl.int32)
        index -= tl.cdiv(tokens, KEYS_BLOCK) * KEYS_BLOCK
        is_key = tl.where(is_local == 1, is_key, index < GLOBALS)
        term = tl.where(is_local == 1, term, tl.where(is_key, end + index, 0))
        number = tl.where(is_local == 1, number, index)
    k = _load(key, number.to(tl.int64) * key_n, is_key, key_d, CHANNELS, CHANNELS_BLOCK)
    v = _load(value, number.to(tl.int64) * value_n, is_key, value_d, CHANNELS, CHANNELS_BLOCK)

    dk = tl.zeros([KEYS_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    dv = tl.zeros([KEYS_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    for start in range(0, tokens, QUERIES_BLOCK):
        token = start + tl.arange(0, QUERIES_BLOCK)
        is_token = token < tokens
        q = _load(query, token.to(tl.int64) * query_n, is_token, query_d, CHANNELS, CHANNELS_BLOCK)
        do = _load(grad, token.to(tl.int64) * grad_n, is_token, grad_d, CHANNELS, CHANNELS_BLOCK)
        place = tl.load(places + token, mask=is_token, other=0)
        lse_i = tl.load(lse + token, mask=is_token, other=float("inf"))
        delta_i = tl.load(delta + token, mask=is_token, other=0.0)
        weights = tl.exp2(_scores(k, q, term, place * is_local, table, SCALE, ACC_DTYPE) - lse_i[None, :])
        dv = _add_products(dv, weights, do, ACC_DTYPE)
        dk = _add_products(dk, weights * (_products(v, do, ACC_DTYPE) - delta_i[None, :]), q, ACC_DTYPE)
    row = ((batch * (GLOBALS + tokens) + number) * heads + head) * CHANNELS
    _store(key_grad, dk * SCALE, row, is_key, CHANNELS, CHANNELS_BLOCK)
    _store(value_grad, dv, row, is_key, CHANNELS, CHANNELS_BLOCK)


@triton.jit(do_not_specialize=SIZES)
def pair_grad_kernel(
    query, key, value, table, lse, delta, grad, partial,
    query_b, query_m, query_n, query_d,
    key_b, key_m, key_n, key_d,
    value_b, value_m, value_n, value_d,
    grad_b, grad_m, grad_n, grad_d,
    batches, height, width, rows,
    GLOBALS: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr, QUERIES_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of scores over images and groups of ``rows`` rows, for queries and keys relative to a group.

    Keys are numbered from the first row that the last group can reach: (groups - 1) * rows rows before a group. All
    pairs that are summed have the same offset. Partial sums are (shares, M, rows * W, (groups - 1) * rows + H, W).
    Grid: blocks of queries by blocks of keys, heads, shares of the images.
    """
    head, share = tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads, tokens, length = tl.num_programs(1), height * width, rows * width
    first, end = _table_sizes(height, width)
    groups = tl.cdiv(height, rows)
    before = (groups - 1) * length
    keys = before + tokens
    blocks = tl.cdiv(keys, KEYS_BLOCK)
    query += head * query_m
    key += head * key_m
    value += head * value_m
    grad += head * grad_m
    index = tl.program_id(0) // blocks * QUERIES_BLOCK + tl.arange(0, QUERIES_BLOCK)
    start = tl.program_id(0) % blocks * KEYS_BLOCK
    slot = start + tl.arange(0, KEYS_BLOCK)
    # Row and column offsets, query minus key
    down = (index // width)[:, None] - (slot // width - (groups - 1) * rows)[None, :]
    right = (index % width)[:, None] - (slot % width)[None, :]
    is_pair = (index < length)[:, None] & (slot < keys)[None, :] & (down < height) & (down > -height)
    place = (down + height - 1) * (2 * width - 1) + right + width - 1
    bias = tl.load(table + head * (end + GLOBALS) + first + place, mask=is_pair, other=float("-inf"))
    # The groups for which a key of this block is a token
    least = (tl.maximum(before - start - KEYS_BLOCK + 1, 0) + length - 1) // length
    most = tl.minimum((tl.maximum(tokens - 1 + before - start, 0)) // length + 1, groups)

    q_offset = index.to(tl.int64) * query_n
    do_offset = index.to(tl.int64) * grad_n
    k_offset = (slot - before + GLOBALS).to(tl.int64) * key_n
    v_offset = (slot - before + GLOBALS).to(tl.int64) * value_n
    total = tl.zeros([QUERIES_BLOCK, KEYS_BLOCK], ACC_DTYPE)
    # The image, and the first token of the group
    batch, origin = share.to(tl.int64), least * length
    for _ in range(0, tl.cdiv(batches - share, tl.num_programs(2)) * tl.maximum(most - least, 1)):
        is_token = index < tl.minimum(length, tokens - origin)
        # A negative number is a large unsigned number.
        is_seen = (slot + (origin - before)).to(tl.uint32, bitcast=True) < tokens.to(tl.uint32, bitcast=True)
        origin_64 = origin.to(tl.int64)
        q = _load(query + batch * query_b + origin_64 * query_n, q_offset, is_token, query_d, CHANNELS, CHANNELS_BLOCK)
        do = _load(grad + batch * grad_b + origin_64 * grad_n, do_offset, is_token, grad_d, CHANNELS, CHANNELS_BLOCK)
        k = _load(key + batch * key_b + origin_64 * key_n, k_offset, is_seen, key_d, CHANNELS, CHANNELS_BLOCK)
        v = _load(value + batch * value_b + origin_64 * value_n, v_offset, is_seen, value_d, CHANNELS, CHANNELS_BLOCK)
        row = (batch * heads + head) * tokens + origin_64
        lse_i = tl.load(lse + row + index, mask=is_token, other=float("inf"))
        delta_i = tl.load(delta + row + index, mask=is_token, other=0.0)
        scores = _products(q, k, ACC_DTYPE) * (SCALE * LOG2_E) + bias
        weights = tl.where(is_seen[None, :], tl.exp2(scores - lse_i[:, None]), 0.0)
        total += weights * (_products(do, v, ACC_DTYPE) - delta_i[:, None])
        is_last = origin + length >= most * length
        batch += tl.where(is_last, tl.num_programs(2), 0)
        origin = tl.where(is_last, least * length, origin + length)
    partial += (share * heads + head) * length * keys
    mask = (index < length)[:, None] & (slot < keys)[None, :]
    tl.store(partial + index.to(tl.int64)[:, None] * keys + slot[None, :], total, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def offset_grad_kernel(
    partial, offset_bias_grad,
    height, width, rows, shares,
    QUERIES_BLOCK: tl.constexpr, OFFSETS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of pairs with the same offset: (M, 2 * H - 1, 2 * W - 1).

    Grid: blocks of column offsets, row offsets, heads.
    """
    head, heads = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    length, before = rows * width, (tl.cdiv(height, rows) - 1) * rows
    keys = (before + height) * width
    right = tl.program_id(0) * OFFSETS_BLOCK + tl.arange(0, OFFSETS_BLOCK)
    down = tl.program_id(1) - (height - 1)
    total = tl.zeros([OFFSETS_BLOCK], ACC_DTYPE)
    for step in range(0, shares * tl.cdiv(length, QUERIES_BLOCK)):
        share = step % shares
        index = step // shares * QUERIES_BLOCK + tl.arange(0, QUERIES_BLOCK)
        row = index // width - down + before
        col = (index % width)[:, None] - (right - (width - 1))[None, :]
        is_pair = ((index < length) & (row >= 0) & (row < before + height))[:, None] & (col >= 0) & (col < width)
        offset = ((share * heads + head) * length + index) * keys + row * width
        total += tl.sum(tl.load(partial + offset[:, None] + col, mask=is_pair, other=0.0), 0)
    pointer = offset_bias_grad + (head * (2 * height - 1) + tl.program_id(1)) * (2 * width - 1) + right
    tl.store(pointer, total, mask=right < 2 * width - 1)
