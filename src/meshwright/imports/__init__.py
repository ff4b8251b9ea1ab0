"""Configuration files of other systems, which become recipes: nothing in them is dropped in silence."""
