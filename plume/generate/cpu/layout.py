"""How weights and working memory lie for the CPU engine: plain numbers, free of any heavy import."""

from typing import NamedTuple

LANES = 16  # numbers in one vector; the compiler cuts it into what the machine has
PANEL = 32  # weight rows standing side by side in memory
GROUP = 64  # int8 values that share one scale
HEADER = 4 * PANEL  # bytes in front of a float panel: one scale for each of its rows
FIXED = 3 * PANEL  # bytes of a float panel for one column: 16 high bits of each row's weight, then 8 low bits of each

GELU_TANH, GELU, RELU = 0, 1, 2
# entries of the table of addresses: those of each layer, then those of the whole model
ATTN_NORM, QKV, QKV_BIAS, OUT, OUT_BIAS, MLP_NORM, UP, UP_BIAS, DOWN, DOWN_BIAS, PER_LAYER = range(11)
POSITIONS, FINAL_NORM, HEAD = range(3)
JOB_NUMBER, JOB_ROWS, JOB_WANTED, JOB_BARRIER, JOB_SIZE = 0, 1, 2, 16, 32  # the barrier has a cache line of its own


def padded(n: int) -> int:
    """Rows, and int8 columns, come in whole groups."""
    return -(-n // GROUP) * GROUP


class Shape(NamedTuple):
    """What the compiled code must know of a model and of the memory it works in."""

    layers: int
    width: int
    heads: int
    head_width: int
    hidden: int
    vocab: int
    band: int
    post_norm: int
    activation: int
    int8: int
    capacity: int  # tokens a slot can hold, a multiple of LANES
    threads: int
    x: int  # addresses of the working memory
    act: int
    codes: int
    qkv: int
    mixed: int
    middle: int
    logits: int
    private: int
    private_bytes: int
    panels: int  # each thread's unpacked one
    panel_bytes: int
    keys: int
    values: int
    width_stride: int  # row lengths of the working memory
    qkv_stride: int
    middle_stride: int
    codes_stride: int
    middle_codes: int
    middle_codes_stride: int
    logits_stride: int
    scores_stride: int
