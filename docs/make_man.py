"""Writes the man pages in man/, which the wheel installs: `make check` compares them."""

import argparse
from pathlib import Path

from meshwright.cli.manual import pages

FOLDER = Path(__file__).resolve().parents[1] / "man"


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
