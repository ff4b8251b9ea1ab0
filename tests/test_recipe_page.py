"""The recipe's reference page is the fields' own documentation."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_page_is_what_the_fields_say():
    page = runpy.run_path(str(DOCS / "make_recipe_md.py"))["page"]
    assert (DOCS / "recipe.md").read_text() == page(), "run: python docs/make_recipe_md.py"
