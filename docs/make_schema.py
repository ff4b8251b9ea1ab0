"""Writes the recipe's JSON schema, which the package ships for editors."""

import argparse
import json

from meshwright.spec.schema import SCHEMA, recipe_schema


def main() -> None:
    """Write the file."""
    SCHEMA.write_text(json.dumps(recipe_schema(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
