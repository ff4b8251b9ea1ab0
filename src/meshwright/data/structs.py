"""Values of Arrow columns as Python values, without the keys that a shared struct type adds.

All rows of a column have one type, so a struct has the keys of every row, and null for those that a row lacks. Arrow,
and so Parquet and `datasets`, stores an absent key like a key with null. Here a null in a struct is an absent key, with
one exception: if the record's own tool requires an argument and allows null, the call must have said null. JSON (as
text, or as Arrow's type `json`) and maps keep every null.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from meshwright.data.sources import require
from meshwright.spec.errors import UserError
from meshwright.storage.jsonl import distinct_keys, parse_json

Read = Callable[[Any], Any]
"""Converts a value that pyarrow's `to_pylist` returned, and that is not None."""
JSON_TYPE = b"arrow.json"
"""Arrow's extension type of JSON text. `datasets` stores values in it whose types differ between rows."""


class Struct(dict[str, Any]):
    """A value of a struct type, without its null fields."""

    names: tuple[str, ...] = ()
    """All fields of the type."""

    @property
    def leaves_out(self) -> bool:
        """Whether a field was null."""
        return len(self) < len(self.names)


def readers_of(schema: Any, where: str) -> dict[str, Read]:
    """The conversions of the columns that need one, by name. Raises UserError, which starts with `where`, for a type
    that cannot be read without loss."""
    arrow, readers = require("pyarrow", f"reading {where}"), dict[str, Read]()
    for field in schema:
        try:
            read = _reader_of(field, arrow)
        except UserError as error:
            raise UserError(f"{where}: column {field.name!r}: {error}") from None
        readers |= {field.name: read} if read else {}
    return readers


def read_row(fields: dict[str, Any], readers: Mapping[str, Read], where: str) -> dict[str, Any]:
    """A row with converted values. Raises UserError, which starts with `where`, for a value that is damaged."""
    for name, read in readers.items():
        try:
            fields[name] = None if fields[name] is None else read(fields[name])
        except UserError as error:
            raise UserError(f"{where}: column {name!r}: {error}") from None
    return fields


def _reader_of(field: Any, arrow: ModuleType) -> Read | None:
    """The conversion of a field's values; None if they need none."""
    kind, types = field.type, arrow.types
    # pyarrow before 19 does not know the type, and names it in the metadata.
    if JSON_TYPE in (getattr(kind, "extension_name", "").encode(), (field.metadata or {}).get(b"ARROW:extension:name")):
        return _read_json
    if hasattr(kind, "storage_type") or types.is_dictionary(kind):
        stored = kind.storage_type if hasattr(kind, "storage_type") else kind.value_type
        return _reader_of(arrow.field("", stored), arrow)
    if types.is_map(kind):
        return _map_reader(_reader_of(kind.item_field, arrow))
    if types.is_struct(kind) or types.is_union(kind):
        children = distinct_keys([(child.name, _reader_of(child, arrow)) for child in kind])
        if types.is_union(kind) and any(children.values()):
            raise UserError("a union of structs or lists cannot be read; store the values as JSON text")
        return _struct_reader(children) if types.is_struct(kind) else None
    inner = _reader_of(kind.value_field, arrow) if hasattr(kind, "value_field") else None
    return inner and (lambda values: [None if value is None else inner(value) for value in values])


def with_required_nulls(arguments: Any, schema: Any) -> Any:
    """The arguments of a call with the nulls that the record must have said, according to the tool's JSON Schema."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(arguments, list):
        return [with_required_nulls(value, schema.get("items")) for value in arguments]
    if not isinstance(arguments, Struct):
        return arguments
    properties, required = schema.get("properties"), _listed(schema.get("required"))
    properties = properties if isinstance(properties, Mapping) else {}
    struct = Struct()
    struct.names = arguments.names
    for name in arguments.names:
        if name in arguments or (name in required and _may_be_null(properties.get(name))):
            struct[name] = with_required_nulls(arguments.get(name), properties.get(name))
    return struct


def has_structs(fields: Mapping[str, Any]) -> bool:
    """Whether a column of a row is a struct or a list of them."""
    values = (value if isinstance(value, list) else [value] for value in fields.values())
    return any(isinstance(value, Struct) for listed in values for value in listed)


def leaves_out(value: Any) -> bool:
    """Whether null fields of a struct are left out anywhere in the value."""
    if isinstance(value, list):
        return any(map(leaves_out, value))
    if isinstance(value, Mapping):
        return (isinstance(value, Struct) and value.leaves_out) or any(map(leaves_out, value.values()))
    return False


def _struct_reader(children: Mapping[str, Read | None]) -> Read:
    names = tuple(children)

    def read_struct(value: Mapping[str, Any]) -> Struct:
        struct = Struct()
        struct.names = names
        for name, read in children.items():
            if (inner := value[name]) is not None:
                struct[name] = read(inner) if read else inner
        return struct

    return read_struct


def _map_reader(read: Read | None) -> Read:
    def read_map(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = distinct_keys(pairs)
        return {name: read(value) if read and value is not None else value for name, value in fields.items()}

    return read_map


def _read_json(text: str) -> Any:
    return parse_json(text, "a JSON value")


def _may_be_null(schema: Any) -> bool:
    """Whether a JSON Schema allows null explicitly."""
    if not isinstance(schema, Mapping):
        return False
    choices = [*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))]
    return (
        "null" in _listed(schema.get("type"))
        or schema.get("nullable") is True
        or None in _listed(schema.get("enum", []))
        or any(map(_may_be_null, choices))
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
