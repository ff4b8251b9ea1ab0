"""YAML documents: plain data only, every value with its file and line.

Scalars follow YAML 1.2's core schema, so `1e-4` is a number and `on`, `no` and `yes` are text. Features that surprise
people in a configuration are refused with their line: duplicate keys, tags, anchors, aliases and merge keys.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
"""The path of a value in the document: keys of mappings and indices of lists, outermost first."""

FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml, six times as fast, where PyYAML was built with it."""
READ_OTHERWISE = re.compile(r"[\t\ufeff]|[|>][-+0-9]*#")
"""Texts that may not be YAML and that libyaml accepts all the same: tabs, marks of byte order, `|#`."""
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(frozen=True, order=True)
class Origin:
    """The origin of a value: a line of a file, or an override on the command line."""

    order: int
    """Sort key of problems: lines of the file first, then overrides in the order given."""
    text: str
    """The text shown to users: `run.yaml:12`, or `command line: training.steps=5`."""
    names: str = ""
    """The dotted path that `text` already contains (for overrides), so that a message need not repeat it."""

    def says(self, path: KeyPath, message: str) -> str:
        """The message about the value at `path`, as one line that starts with this place."""
        subject = "" if dotted(path) in ("", self.names) else f"{dotted(path)}: "
        return f"{self.text}: {subject}{message}"


@dataclass(frozen=True, order=True)
class Problem:
    """One error, with its place."""

    place: Origin
    message: str
    """The whole printed line, including the place."""


@dataclass
class YamlDocument:
    """Plain data, the position of every value in it, and the errors in its text."""

    value: Any
    places: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath) -> Origin:
        """The place of the value at `path`, or of the nearest value around it."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def refuse(self, path: KeyPath, message: str, place: Origin | None = None) -> None:
        """Record that the value at `path` is invalid."""
        place = place or self.place(path)
        self.problems.append(Problem(place, place.says(path, message)))


def dotted(path: KeyPath) -> str:
    """A path in dotted form: `data.sources.0` for `("data", "sources", 0)`."""
    return ".".join(str(part) for part in path)


def scalar(text: str) -> Any:
    """The value of an unquoted scalar: null, true or false, a number, else text.

    `.inf` and `.nan` stay text, because no setting of a run has these values.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text) and abs(float(text)) != float("inf"):
        return float(text)
    return text


def read_yaml(text: str, place_of_line: Callable[[int], Origin]) -> YamlDocument:
    """Parse YAML text (one document); `place_of_line` turns a line number, counted from 1, into a place.

    Problems are collected in the document instead of raised; the rest is read if possible.
    """
    document = YamlDocument(value=None, places={(): place_of_line(1)})
    try:
        try:
            refusals, node = _nodes(text, yaml.SafeLoader if READ_OTHERWISE.search(text) else FAST_LOADER)
        except yaml.YAMLError:  # again, for the messages that `_syntax` knows
            refusals, node = _nodes(text, yaml.SafeLoader)
        if node is not None:
            document.value = _construct(node, (), document, place_of_line)
    except yaml.MarkedYAMLError as error:
        refusals = [_syntax(error)]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        refusals = [(line, f"character U+{error.character:04X} is not allowed in a YAML file")]
    except RecursionError:
        refusals = [(1, "nested too deeply")]
    for line, message in refusals:
        document.refuse((), message, place_of_line(line))
    return document


def _nodes(text: str, loader: Any) -> tuple[list[tuple[int, str]], yaml.Node | None]:
    """The forbidden features of a text, and its nodes if there are none; raises `yaml.YAMLError`."""
    refusals = list(_refusals(text, loader))
    return refusals, None if refusals else yaml.compose(text, Loader=loader)


def _refusals(text: str, loader: Any) -> Iterator[tuple[int, str]]:
    """The forbidden YAML features in a text, as (line, message)."""
    documents = 0
    for event in yaml.parse(text, Loader=loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                yield line, "a second document ('---') starts here; a file holds one"
        elif isinstance(event, yaml.AliasEvent):
            yield line, f"'*{event.anchor}' is an alias in YAML; write the value out, or quote what is text"
        elif isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            yield line, f"'&{event.anchor}' is an anchor in YAML; leave it out, or quote what is text"
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            yield line, f"the tag '{tag}' is not allowed: a recipe is plain data"


def _construct(node: yaml.Node, path: KeyPath, document: YamlDocument, place_of_line: Callable[[int], Origin]) -> Any:
    document.places.setdefault(path, place_of_line(node.start_mark.line + 1))
    if isinstance(node, yaml.MappingNode):
        mapping = {}
        for key_node, value_node in node.value:
            place = place_of_line(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                document.refuse(path, "a key is a single word", place)
            elif key_node.value == "<<" and not key_node.style:
                document.refuse(path, "merge keys ('<<') are not supported; write the values out", place)
            elif key_node.value in mapping:
                first = document.places[(*path, key_node.value)].text
                document.refuse((*path, key_node.value), f"given twice, first at {first}", place)
            else:
                key = key_node.value
                document.places[(*path, key)] = place
                mapping[key] = _construct(value_node, (*path, key), document, place_of_line)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*path, index), document, place_of_line) for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    return node.value if node.style else scalar(node.value)


def _syntax(error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """(line, sentence) of a YAML syntax error, for users who do not know the YAML specification."""
    problem, context = error.problem or "", error.context or ""
    here = error.problem_mark.line + 1 if error.problem_mark else 1
    began = error.context_mark.line + 1 if error.context_mark else here
    if "'\\t'" in problem:
        return here, "YAML needs spaces here, not a tab"
    if "scanning an alias" in context or "scanning an anchor" in context:
        return here, "a value that starts with '*' or '&' needs quotes, for example \"*.txt\""
    if "mapping values are not allowed" in problem:
        return here, "':' is not expected here; check the indentation, or quote a value that contains ': '"
    if "could not find expected ':'" in problem:
        return began, "this line is not 'key: value' (a space follows the colon)"
    if "quoted scalar" in context:
        return began, "the quote that starts here is never closed"
    if "parsing a flow" in context:
        return began, "the bracket that starts here is never closed, or a comma is missing in it"
    if "expected <block end>" in problem:
        return here, "the indentation does not match the lines above"
    if "cannot start any token" in problem:
        return here, problem.replace("found character", "a value cannot start with").partition(" that ")[0]
    return here, f"not valid YAML: {problem or context}"


class _Dumper(yaml.SafeDumper):
    """A dumper with block mappings, one-line lists, and quotes around every text that could be read as another type."""


def _tag(name: str) -> str:
    return f"tag:yaml.org,2002:{name}"


_Dumper.add_implicit_resolver(_tag("float"), re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))
_Dumper.add_implicit_resolver(_tag("int"), re.compile(f"^(?:{_INTEGER.pattern})$"), list("-+0123456789"))
_Dumper.add_representer(list, lambda dumper, data: dumper.represent_sequence(_tag("seq"), data, flow_style=True))


def write_yaml(value: Any) -> str:
    """Plain data as YAML text that `read_yaml` and YAML 1.1 readers read back to the same data."""
    style = {"sort_keys": False, "allow_unicode": True, "width": 2**20, "default_flow_style": False}
    return yaml.dump(value, Dumper=_Dumper, **style)
