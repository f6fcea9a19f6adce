"""Which core runs: its modules as mypyc compiled them, or as Python reads them."""

COMPILED = not __file__.endswith(".py")


def running() -> str:
    """`compiled` or `python`."""
    return "compiled" if COMPILED else "python"
