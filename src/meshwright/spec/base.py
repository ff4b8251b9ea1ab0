"""The base of every recipe object: frozen data, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A section of a recipe: immutable, keyword-only, JSON in and out, every field documented where it is declared.

    A field's `description` is its only documentation: the comments of `meshwright init`, the reference in the docs
    and error messages are all read from it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
