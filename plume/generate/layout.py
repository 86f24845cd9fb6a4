"""How weights lie in memory for the CPU engine: plain numbers, free of any heavy import."""

LANES = 16  # numbers in one vector; the compiler cuts it into what the machine has
PANEL = 32  # weight rows standing side by side in memory
GROUP = 64  # int8 values that share one scale


def padded(n: int) -> int:
    """Rows, and int8 columns, come in whole groups."""
    return -(-n // GROUP) * GROUP
