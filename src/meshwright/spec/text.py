"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `3 microbatches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"
