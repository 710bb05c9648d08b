"""Triton kernels for attention of chunks to windows. :mod:`.triton_chunks` launches them. The import needs triton.

A program computes a block of the positions of one chunk and one head. It iterates over the tokens of the window of this
chunk, block by block. The window has SIDE tokens around the chunk, or consists of the chunk and one neighbor. The token
of a slot follows from the number of the slot, so that nothing is padded, copied or gathered into memory. If a chunk
attends to a second one, the second attends to the first. Therefore the gradients of keys are computed in the same way,
with queries and keys exchanged.

Scores and their log-sum-exps are to base 2. One program writes each value. There are no atomic additions, so results do
not vary from run to run. Offsets into feature maps have 64 bits.

Shapes: B images, M heads, H x W tokens, D channels per head, G global tokens or projected keys, w x w = P positions of
a chunk, S tokens of a window, (w + 2 * SIDE)^2 or 2 * P. The strides of queries, keys, values and the gradient of the
output are named after these axes. Global keys and values (B, M, G, D), the local bias (M, P, PITCH) and the global bias
(M, G) are contiguous. The local bias is to base 2, and S of PITCH values are used. Outputs lie in memory as
(B, H, W, M, D), or as (B, H, W, M) without channels.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Finite and lower than every score: a row whose keys so far are all hidden has weights of 0.
LOWEST: tl.constexpr = tl.constexpr(-1e30)
# One compiled kernel is used for all feature maps and shifts.
SIZES = ("batches", "height", "width", "shift_row", "shift_col")


@triton.jit
def _own_tokens(chunk, block, height, width, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row and column of a chunk, and a block of its positions: numbers, rows, columns, which are tokens."""
    cols = tl.cdiv(width, WINDOW)
    chunk_row = chunk // cols
    chunk_col = chunk % cols
    position = block * BLOCK + tl.arange(0, BLOCK)
    row = chunk_row * WINDOW + position // WINDOW
    col = chunk_col * WINDOW + position % WINDOW
    is_token = (position < WINDOW * WINDOW) & (row < height) & (col < width)
    return chunk_row, chunk_col, position, row, col, is_token


@triton.jit
def _tokens_of_program(height, width, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Return the result of :func:`_own_tokens` for a grid whose first axis is chunks by blocks of positions."""
    BLOCKS: tl.constexpr = (WINDOW * WINDOW + BLOCK - 1) // BLOCK
    return _own_tokens(tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, height, width, WINDOW, BLOCK)


@triton.jit
def _along_axis(slot, chunk, size, WINDOW: tl.constexpr, SIDE: tl.constexpr, MODE: tl.constexpr):
    """Return the positions of slots around a chunk along an axis of ``size`` tokens, and which of them are tokens."""
    position = chunk * WINDOW - SIDE + slot
    if MODE == "cyclic":
        # With fewer than three chunks, the chunk at the opposite border is already a neighbor.
        whole = tl.cdiv(size, WINDOW) * WINDOW
        wraps = whole >= 3 * WINDOW
        position = tl.where(wraps & (position < 0), position + whole, position)
        position = tl.where(wraps & (position >= whole), position - whole, position)
    return position, (position >= 0) & (position < size)


@triton.jit
def _seen_tokens(
    index, chunk_row, chunk_col, height, width, shift_row, shift_col,
    WINDOW: tl.constexpr, SIDE: tl.constexpr, SEEN: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Return, for slots of a window, their rows and columns in it and in the feature map, and which are tokens."""
    if SEEN == 2 * WINDOW * WINDOW:
        # The own chunk, then the neighbor
        is_neighbor = index // (WINDOW * WINDOW)
        position = index % (WINDOW * WINDOW)
        slot_row = (1 + is_neighbor * shift_row) * WINDOW + position // WINDOW
        slot_col = (1 + is_neighbor * shift_col) * WINDOW + position % WINDOW
    else:
        slot_row = index // (WINDOW + 2 * SIDE)
        slot_col = index % (WINDOW + 2 * SIDE)
    row, is_row = _along_axis(slot_row, chunk_row, height, WINDOW, SIDE, MODE)
    col, is_col = _along_axis(slot_col, chunk_col, width, WINDOW, SIDE, MODE)
    return slot_row, slot_col, row, col, (index < SEEN) & is_row & is_col


@triton.jit
def _reached_by(position, WINDOW: tl.constexpr, SIDE: tl.constexpr):
    """Return a bit for each of the nine chunks around a position, row by row: whether its window has the position."""
    row, col = position // WINDOW, position % WINDOW
    rows = (row < SIDE).to(tl.int32) + 8 + (row >= WINDOW - SIDE).to(tl.int32) * 64
    cols = (col < SIDE).to(tl.int32) + 2 + (col >= WINDOW - SIDE).to(tl.int32) * 4
    return rows * cols


@triton.jit
def _offset(row, col, stride_h, stride_w):
    return row.to(tl.int64) * stride_h + col.to(tl.int64) * stride_w


@triton.jit
def _token_index(row, col, batch, head, heads, height, width):
    """Return the flat index of a token among the (B, H, W, M) of all images and heads."""
    return ((batch.to(tl.int64) * height + row) * width + col) * heads + head


@triton.jit
def _load(pointer, offset, is_token, stride_d, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Load (tokens, BLOCK), with zeros for missing tokens and channels."""
    channel = tl.arange(0, BLOCK)[None, :]
    mask = is_token[:, None] & (channel < CHANNELS)
    return tl.load(pointer + offset[:, None] + channel * stride_d, mask=mask, other=0.0)


@triton.jit
def _store(pointer, x, offset, is_token, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Store (tokens, BLOCK) in a tensor with contiguous channels."""
    channel = tl.arange(0, BLOCK)[None, :]
    mask = is_token[:, None] & (channel < CHANNELS)
    tl.store(pointer + offset[:, None] + channel, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _products(a, b, ACC_DTYPE: tl.constexpr):
    """Return (rows, cols) from (rows, D) and (cols, D), summed in float32 or better. Products of float32 are exact."""
    return tl.dot(a, tl.trans(b), input_precision="ieee", out_dtype=ACC_DTYPE)


@triton.jit
def _add_products(total, a, b, ACC_DTYPE: tl.constexpr):
    """Add weights (rows, cols), rounded to the dtype of ``b``, times ``b`` (cols, D) to ``total`` (rows, D)."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="ieee", out_dtype=ACC_DTYPE)


@triton.jit
def _scores(
    own, seen, position, index, slot_row, slot_col, is_seen, local_bias,
    WINDOW: tl.constexpr, PITCH: tl.constexpr, SCALE: tl.constexpr, MODE: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the scores (positions, tokens) of a block, to base 2, with -inf for hidden tokens.

    The bias of the head is added. Heads are the second axis of the grid.
    """
    scores = _products(own, seen, ACC_DTYPE) * (SCALE * LOG2_E)
    if local_bias is not None:
        mask = (position < WINDOW * WINDOW)[:, None]
        row = tl.program_id(1) * WINDOW * WINDOW + position
        bias = tl.load(local_bias + row[:, None] * PITCH + index[None, :], mask=mask, other=0.0)
        scores += bias.to(ACC_DTYPE)
    is_seen = is_seen[None, :]
    if MODE == "exact":
        down = slot_row[None, :] - WINDOW - (position // WINDOW)[:, None]
        right = slot_col[None, :] - WINDOW - (position % WINDOW)[:, None]
        is_near = (down <= WINDOW) & (down >= -WINDOW) & (right <= WINDOW) & (right >= -WINDOW)
        is_seen = is_seen & is_near
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def _global_scores(own, seen, index, global_bias, GLOBALS: tl.constexpr, SCALE: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Return the scores of tokens and global tokens, as :func:`_scores`, with -inf beyond the global tokens."""
    scores = _products(own, seen, ACC_DTYPE) * (SCALE * LOG2_E)
    if global_bias is not None:
        bias = tl.load(global_bias + tl.program_id(1) * GLOBALS + index, mask=index < GLOBALS, other=0.0)
        scores += (bias.to(ACC_DTYPE) * LOG2_E)[None, :]
    return tl.where((index < GLOBALS)[None, :], scores, float("-inf"))


@triton.jit
def _attend(scores, value, largest, total, result, ACC_DTYPE: tl.constexpr):
    """Update the largest scores so far, the sums of the weights, and the weighted sums of the values."""
    larger = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - larger[:, None])
    factor = tl.exp2(largest - larger)
    total = total * factor + tl.sum(weights, 1)
    result = _add_products(result * factor[:, None], weights, value, ACC_DTYPE)
    return larger, total, result


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query, key, value, global_key, global_value, local_bias, global_bias, output, lse,
    query_b, query_m, query_h, query_w, query_d,
    key_b, key_m, key_h, key_w, key_d,
    value_b, value_m, value_h, value_w, value_d,
    height, width, shift_row, shift_col,
    WINDOW: tl.constexpr, SIDE: tl.constexpr, SEEN: tl.constexpr, PITCH: tl.constexpr, GLOBALS: tl.constexpr,
    CHANNELS: tl.constexpr, SCALE: tl.constexpr, MODE: tl.constexpr, POSITIONS_BLOCK: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr, GLOBALS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute outputs and log-sum-exps. Grid: chunks by blocks of positions, heads, images."""
    head, batch = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    chunk_row, chunk_col, position, row, col, is_token = _tokens_of_program(height, width, WINDOW, POSITIONS_BLOCK)
    query += batch.to(tl.int64) * query_b + head.to(tl.int64) * query_m
    key += batch.to(tl.int64) * key_b + head.to(tl.int64) * key_m
    value += batch.to(tl.int64) * value_b + head.to(tl.int64) * value_m
    q = _load(query, _offset(row, col, query_h, query_w), is_token, query_d, CHANNELS, CHANNELS_BLOCK)

    largest = tl.full([POSITIONS_BLOCK], LOWEST, ACC_DTYPE)
    total = tl.zeros([POSITIONS_BLOCK], ACC_DTYPE)
    result = tl.zeros([POSITIONS_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    if GLOBALS > 0:
        for start in range(0, GLOBALS, GLOBALS_BLOCK):
            index = start + tl.arange(0, GLOBALS_BLOCK)
            offset = ((batch * heads + head) * GLOBALS + index) * CHANNELS
            k = _load(global_key, offset, index < GLOBALS, 1, CHANNELS, CHANNELS_BLOCK)
            v = _load(global_value, offset, index < GLOBALS, 1, CHANNELS, CHANNELS_BLOCK)
            scores = _global_scores(q, k, index, global_bias, GLOBALS, SCALE, ACC_DTYPE)
            largest, total, result = _attend(scores, v, largest, total, result, ACC_DTYPE)
    for start in range(0, SEEN, TOKENS_BLOCK):
        index = start + tl.arange(0, TOKENS_BLOCK)
        slot_row, slot_col, seen_row, seen_col, is_seen = _seen_tokens(
            index, chunk_row, chunk_col, height, width, shift_row, shift_col, WINDOW, SIDE, SEEN, MODE
        )
        k = _load(key, _offset(seen_row, seen_col, key_h, key_w), is_seen, key_d, CHANNELS, CHANNELS_BLOCK)
        v = _load(value, _offset(seen_row, seen_col, value_h, value_w), is_seen, value_d, CHANNELS, CHANNELS_BLOCK)
        scores = _scores(
            q, k, position, index, slot_row, slot_col, is_seen, local_bias, WINDOW, PITCH, SCALE, MODE, ACC_DTYPE
        )
        largest, total, result = _attend(scores, v, largest, total, result, ACC_DTYPE)

    # A position outside the image may have no key.
    total = tl.where(is_token, total, 1.0)
    number = _token_index(row, col, batch, head, heads, height, width)
    _store(output, result / total[:, None], number * CHANNELS, is_token, CHANNELS, CHANNELS_BLOCK)
    tl.store(lse + number, largest + tl.log2(total), mask=is_token)


@triton.jit(do_not_specialize=SIZES)
def query_grad_kernel(
    query, key, value, global_key, global_value, local_bias, global_bias, output, lse, grad, query_grad, delta,
    query_b, query_m, query_h, query_w, query_d,
    key_b, key_m, key_h, key_w, key_d,
    value_b, value_m, value_h, value_w, value_d,
    grad_b, grad_m, grad_h, grad_w, grad_d,
    height, width, shift_row, shift_col,
    WINDOW: tl.constexpr, SIDE: tl.constexpr, SEEN: tl.constexpr, PITCH: tl.constexpr, GLOBALS: tl.constexpr,
    CHANNELS: tl.constexpr, SCALE: tl.constexpr, MODE: tl.constexpr, POSITIONS_BLOCK: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr, GLOBALS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, and delta, the product of the output and its gradient. Grid: as forward."""
    head, batch = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    chunk_row, chunk_col, position, row, col, is_token = _tokens_of_program(height, width, WINDOW, POSITIONS_BLOCK)
    query += batch.to(tl.int64) * query_b + head.to(tl.int64) * query_m
    key += batch.to(tl.int64) * key_b + head.to(tl.int64) * key_m
    value += batch.to(tl.int64) * value_b + head.to(tl.int64) * value_m
    grad += batch.to(tl.int64) * grad_b + head.to(tl.int64) * grad_m
    q = _load(query, _offset(row, col, query_h, query_w), is_token, query_d, CHANNELS, CHANNELS_BLOCK)
    do = _load(grad, _offset(row, col, grad_h, grad_w), is_token, grad_d, CHANNELS, CHANNELS_BLOCK)
    number = _token_index(row, col, batch, head, heads, height, width)
    out = _load(output, number * CHANNELS, is_token, 1, CHANNELS, CHANNELS_BLOCK)
    delta_i = tl.sum(do.to(ACC_DTYPE) * out.to(ACC_DTYPE), 1)
    tl.store(delta + number, delta_i, mask=is_token)
    lse_i = tl.load(lse + number, mask=is_token, other=float("inf"))

    dq = tl.zeros([POSITIONS_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    if GLOBALS > 0:
        for start in range(0, GLOBALS, GLOBALS_BLOCK):
            index = start + tl.arange(0, GLOBALS_BLOCK)
            offset = ((batch * heads + head) * GLOBALS + index) * CHANNELS
            k = _load(global_key, offset, index < GLOBALS, 1, CHANNELS, CHANNELS_BLOCK)
            v = _load(global_value, offset, index < GLOBALS, 1, CHANNELS, CHANNELS_BLOCK)
            scores = _global_scores(q, k, index, global_bias, GLOBALS, SCALE, ACC_DTYPE)
            weights = tl.exp2(scores - lse_i[:, None])
            dq = _add_products(dq, weights * (_products(do, v, ACC_DTYPE) - delta_i[:, None]), k, ACC_DTYPE)
    for start in range(0, SEEN, TOKENS_BLOCK):
        index = start + tl.arange(0, TOKENS_BLOCK)
        slot_row, slot_col, seen_row, seen_col, is_seen = _seen_tokens(
            index, chunk_row, chunk_col, height, width, shift_row, shift_col, WINDOW, SIDE, SEEN, MODE
        )
        k = _load(key, _offset(seen_row, seen_col, key_h, key_w), is_seen, key_d, CHANNELS, CHANNELS_BLOCK)
        v = _load(value, _offset(seen_row, seen_col, value_h, value_w), is_seen, value_d, CHANNELS, CHANNELS_BLOCK)
        scores = _scores(
            q, k, position, index, slot_row, slot_col, is_seen, local_bias, WINDOW, PITCH, SCALE, MODE, ACC_DTYPE
        )
        weights = tl.exp2(scores - lse_i[:, None])
        dq = _add_products(dq, weights * (_products(do, v, ACC_DTYPE) - delta_i[:, None]), k, ACC_DTYPE)
    _store(query_grad, dq * SCALE, number * CHANNELS, is_token, CHANNELS, CHANNELS_BLOCK)


@triton.jit(do_not_specialize=SIZES)
def key_grad_kernel(
    query, key, value, mirrored_bias, lse, delta, grad, key_grad, value_grad,
    query_b, query_m, query_h, query_w, query_d,
    key_b, key_m, key_h, key_w, key_d,
    value_b, value_m, value_h, value_w, value_d,
    grad_b, grad_m, grad_h, grad_w, grad_d,
    height, width, shift_row, shift_col,
    WINDOW: tl.constexpr, SIDE: tl.constexpr, SEEN: tl.constexpr, PITCH: tl.constexpr, CHANNELS: tl.constexpr,
    SCALE: tl.constexpr, MODE: tl.constexpr, POSITIONS_BLOCK: tl.constexpr, TOKENS_BLOCK: tl.constexpr,
    CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values. Grid: as forward.

    Positions are positions of keys. A chunk iterates over the queries of its 3w x 3w neighborhood that attend to it.
    ``shift_row`` and ``shift_col`` have the opposite sign of the forward pass. ``mirrored_bias`` (M, P, PITCH) has
    positions of keys by slots of queries.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    chunk_row, chunk_col, position, row, col, is_token = _tokens_of_program(height, width, WINDOW, POSITIONS_BLOCK)
    query += batch.to(tl.int64) * query_b + head.to(tl.int64) * query_m
    key += batch.to(tl.int64) * key_b + head.to(tl.int64) * key_m
    value += batch.to(tl.int64) * value_b + head.to(tl.int64) * value_m
    grad += batch.to(tl.int64) * grad_b + head.to(tl.int64) * grad_m
    k = _load(key, _offset(row, col, key_h, key_w), is_token, key_d, CHANNELS, CHANNELS_BLOCK)
    v = _load(value, _offset(row, col, value_h, value_w), is_token, value_d, CHANNELS, CHANNELS_BLOCK)

    dk = tl.zeros([POSITIONS_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    dv = tl.zeros([POSITIONS_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    for start in range(0, SEEN, TOKENS_BLOCK):
        index = start + tl.arange(0, TOKENS_BLOCK)
        slot_row, slot_col, seen_row, seen_col, is_seen = _seen_tokens(
            index, chunk_row, chunk_col, height, width, shift_row, shift_col, WINDOW, WINDOW, SEEN, MODE
        )
        q = _load(query, _offset(seen_row, seen_col, query_h, query_w), is_seen, query_d, CHANNELS, CHANNELS_BLOCK)
        do = _load(grad, _offset(seen_row, seen_col, grad_h, grad_w), is_seen, grad_d, CHANNELS, CHANNELS_BLOCK)
        number = _token_index(seen_row, seen_col, batch, head, heads, height, width)
        lse_i = tl.load(lse + number, mask=is_seen, other=0.0)
        delta_i = tl.load(delta + number, mask=is_seen, other=0.0)
        scores = _scores(
            k, q, position, index, slot_row, slot_col, is_seen, mirrored_bias, WINDOW, PITCH, SCALE, MODE, ACC_DTYPE
        )
        if SIDE < WINDOW:
            chunk = 1 << (slot_row // WINDOW * 3 + slot_col // WINDOW)
            is_near = (_reached_by(position, WINDOW, SIDE)[:, None] & chunk[None, :]) != 0
            scores = tl.where(is_near, scores, float("-inf"))
        # May overflow at positions outside the image. Their rows are not stored.
        weights = tl.exp2(scores - lse_i[None, :])
        dv = _add_products(dv, weights, do, ACC_DTYPE)
        dk = _add_products(dk, weights * (_products(v, do, ACC_DTYPE) - delta_i[None, :]), q, ACC_DTYPE)
    number = _token_index(row, col, batch, head, heads, height, width)
    _store(key_grad, dk * SCALE, number * CHANNELS, is_token, CHANNELS, CHANNELS_BLOCK)
    _store(value_grad, dv, number * CHANNELS, is_token, CHANNELS, CHANNELS_BLOCK)


@triton.jit(do_not_specialize=SIZES)
def local_bias_grad_kernel(
    query, key, value, local_bias, lse, delta, grad, partial,
    query_b, query_m, query_h, query_w, query_d,
    key_b, key_m, key_h, key_w, key_d,
    value_b, value_m, value_h, value_w, value_d,
    grad_b, grad_m, grad_h, grad_w, grad_d,
    batches, height, width, shift_row, shift_col,
    WINDOW: tl.constexpr, SIDE: tl.constexpr, SEEN: tl.constexpr, PITCH: tl.constexpr, CHANNELS: tl.constexpr,
    SCALE: tl.constexpr, MODE: tl.constexpr, POSITIONS_BLOCK: tl.constexpr, TOKENS_BLOCK: tl.constexpr,
    CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Sum the local bias' gradient (shares, M, P, S) over a share of the chunks. Grid: blocks, heads, shares."""
    head, share = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    TOKENS_BLOCKS: tl.constexpr = (SEEN + TOKENS_BLOCK - 1) // TOKENS_BLOCK
    block = tl.program_id(0) // TOKENS_BLOCKS
    index = tl.program_id(0) % TOKENS_BLOCKS * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)
    chunks = tl.cdiv(height, WINDOW) * tl.cdiv(width, WINDOW)

    total = tl.zeros([POSITIONS_BLOCK, TOKENS_BLOCK], ACC_DTYPE)
    for step in range(0, tl.cdiv(batches * chunks - share, tl.num_programs(2))):
        number_of_chunk = share + step * tl.num_programs(2)
        batch = number_of_chunk // chunks
        chunk_row, chunk_col, position, row, col, is_token = _own_tokens(
            number_of_chunk % chunks, block, height, width, WINDOW, POSITIONS_BLOCK
        )
        slot_row, slot_col, seen_row, seen_col, is_seen = _seen_tokens(
            index, chunk_row, chunk_col, height, width, shift_row, shift_col, WINDOW, SIDE, SEEN, MODE
        )
        query_offset = batch.to(tl.int64) * query_b + head.to(tl.int64) * query_m + _offset(row, col, query_h, query_w)
        grad_offset = batch.to(tl.int64) * grad_b + head.to(tl.int64) * grad_m + _offset(row, col, grad_h, grad_w)
        key_offset = batch.to(tl.int64) * key_b + head.to(tl.int64) * key_m + _offset(seen_row, seen_col, key_h, key_w)
        value_offset = batch.to(tl.int64) * value_b + head.to(tl.int64) * value_m
        value_offset += _offset(seen_row, seen_col, value_h, value_w)
        q = _load(query, query_offset, is_token, query_d, CHANNELS, CHANNELS_BLOCK)
        do = _load(grad, grad_offset, is_token, grad_d, CHANNELS, CHANNELS_BLOCK)
        k = _load(key, key_offset, is_seen, key_d, CHANNELS, CHANNELS_BLOCK)
        v = _load(value, value_offset, is_seen, value_d, CHANNELS, CHANNELS_BLOCK)
        number = _token_index(row, col, batch, head, heads, height, width)
        lse_i = tl.where(is_token, tl.load(lse + number, mask=is_token, other=0.0), float("inf"))
        delta_i = tl.load(delta + number, mask=is_token, other=0.0)
        scores = _scores(
            q, k, position, index, slot_row, slot_col, is_seen, local_bias, WINDOW, PITCH, SCALE, MODE, ACC_DTYPE
        )
        weights = tl.exp2(scores - lse_i[:, None])
        total += weights * (_products(do, v, ACC_DTYPE) - delta_i[:, None])
    position = block * POSITIONS_BLOCK + tl.arange(0, POSITIONS_BLOCK)
    partial += (share * heads + head).to(tl.int64) * WINDOW * WINDOW * SEEN
    mask = (position < WINDOW * WINDOW)[:, None] & (index < SEEN)[None, :]
    tl.store(partial + position[:, None] * SEEN + index[None, :], total, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def global_grad_kernel(
    query, global_key, global_value, global_bias, lse, delta, grad, key_partial, value_partial, bias_partial,
    query_b, query_m, query_h, query_w, query_d,
    grad_b, grad_m, grad_h, grad_w, grad_d,
    height, width,
    GLOBALS: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr, TOKENS_BLOCK: tl.constexpr,
    GLOBALS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of global keys, values and biases over a share of the tokens of an image.

    Partial sums are (shares, B, M, G, D), or (shares, B, M, G) for biases. Grid: shares by blocks of global tokens,
    heads, images.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    BLOCKS: tl.constexpr = (GLOBALS + GLOBALS_BLOCK - 1) // GLOBALS_BLOCK
    share, shares = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
    query += batch.to(tl.int64) * query_b + head.to(tl.int64) * query_m
    grad += batch.to(tl.int64) * grad_b + head.to(tl.int64) * grad_m
    index = tl.program_id(0) % BLOCKS * GLOBALS_BLOCK + tl.arange(0, GLOBALS_BLOCK)
    is_global = index < GLOBALS
    offset = ((batch * heads + head) * GLOBALS + index) * CHANNELS
    k = _load(global_key, offset, is_global, 1, CHANNELS, CHANNELS_BLOCK)
    v = _load(global_value, offset, is_global, 1, CHANNELS, CHANNELS_BLOCK)

    dk = tl.zeros([GLOBALS_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    dv = tl.zeros([GLOBALS_BLOCK, CHANNELS_BLOCK], ACC_DTYPE)
    db = tl.zeros([GLOBALS_BLOCK], ACC_DTYPE)
    for start in range(share * TOKENS_BLOCK, height * width, shares * TOKENS_BLOCK):
        token = start + tl.arange(0, TOKENS_BLOCK)
        row, col, is_token = token // width, token % width, token < height * width
        q = _load(query, _offset(row, col, query_h, query_w), is_token, query_d, CHANNELS, CHANNELS_BLOCK)
        do = _load(grad, _offset(row, col, grad_h, grad_w), is_token, grad_d, CHANNELS, CHANNELS_BLOCK)
        number = _token_index(row, col, batch, head, heads, height, width)
        lse_i = tl.where(is_token, tl.load(lse + number, mask=is_token, other=0.0), float("inf"))
        delta_i = tl.load(delta + number, mask=is_token, other=0.0)
        scores = _global_scores(q, k, index, global_bias, GLOBALS, SCALE, ACC_DTYPE)
        weights = tl.exp2(scores - lse_i[:, None])
        score_grads = weights * (_products(do, v, ACC_DTYPE) - delta_i[:, None])
        dv = _add_products(dv, tl.trans(weights), do, ACC_DTYPE)
        dk = _add_products(dk, tl.trans(score_grads), q, ACC_DTYPE)
        db += tl.sum(score_grads, 0)
    number = (((share * tl.num_programs(2) + batch) * heads + head) * GLOBALS + index).to(tl.int64)
    _store(key_partial, dk * SCALE, number * CHANNELS, is_global, CHANNELS, CHANNELS_BLOCK)
    _store(value_partial, dv, number * CHANNELS, is_global, CHANNELS, CHANNELS_BLOCK)
    if bias_partial is not None:
        tl.store(bias_partial + number, db, mask=is_global)
