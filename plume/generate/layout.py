"""How weights lie in memory for the CPU engine: plain numbers, free of any heavy import."""

LANES = 16  # numbers in one vector; the compiler cuts it into what the machine has
PANEL = 32  # weight rows standing side by side in memory
GROUP = 64  # int8 values that share one scale
HEADER = 4 * PANEL  # bytes in front of a float panel: one scale for each of its rows
FIXED = 3 * PANEL  # bytes of a float panel for one column: 16 high bits of each row's weight, then 8 low bits of each


def padded(n: int) -> int:
    """Rows, and int8 columns, come in whole groups."""
    return -(-n // GROUP) * GROUP
