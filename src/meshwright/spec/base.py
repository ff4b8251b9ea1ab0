"""The base of every recipe object: frozen data, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A section of a recipe: immutable, keyword-only, convertible from and to JSON, with a docstring under every field.

    The docstring is the field's `description`, from which the comments of `meshwright init` and the reference in the
    docs are made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
