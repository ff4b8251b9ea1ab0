"""Numbers and commands in sentences."""

import shlex

QUANTITIES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def command(*words: object) -> str:
    """A command line of this program to paste into a shell, from its words: `meshwright check 'my run.yaml'`."""
    return shlex.join(["meshwright", *map(str, words)])


def quoted(word: object) -> str:
    """A path or a setting as a word of a shell."""
    return shlex.quote(str(word))


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `3 microbatches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def billions(parameters: float) -> str:
    """A number of parameters: `0.124B`, `70.6B`, `1.03T`."""
    return f"{parameters / 1e12:.3g}T" if parameters >= 1e12 else f"{parameters / 1e9:.3g}B"


def quantity_text(number: float) -> str:
    """A number of tokens: `65.5k`, `300B`, `1.5T`."""
    size, unit = next(((size, unit) for size, unit in QUANTITIES if number >= size), (1.0, ""))
    return f"{number / size:.3g}{unit}"
