"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `3 microbatches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def billions(parameters: float) -> str:
    """A number of parameters: `0.124B`, `70.6B`, `1.03T`."""
    return f"{parameters / 1e12:.3g}T" if parameters >= 1e12 else f"{parameters / 1e9:.3g}B"
