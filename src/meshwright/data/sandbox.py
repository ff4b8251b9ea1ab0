"""Jinja for chat templates: transformers' dialect in a sandbox, with limits on loops, calls and the size of values.

A chat template comes with a published model and is untrusted. Jinja's sandbox denies it access to Python's internals;
this file also stops it from running forever and from filling the memory. The limits count the template's own steps, so
a template passes or fails in the same way on every machine.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from functools import wraps
from typing import Any, Literal

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from meshwright.spec.errors import UserError

STEPS = 3_000_000
"""Most loop iterations of one conversation."""
CALL = 10
"""Iterations that a call counts as."""
LARGEST = 1 << 24
"""Most characters of a value, and of a rendered conversation."""
ITEM = 16
"""Characters that an item of a list counts as."""
CHARACTERS_PER_STEP = 256
"""Characters produced that count as one step."""
LONGEST_SOURCE = 1 << 20
"""Most characters of a template."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""Markers around `{% generation %}` blocks while rendering: code points that no text contains."""
_WIDTH = re.compile(r"\d{6,}")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, used through `render` only."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, source: str, *, today: date):
        """Compile a template. `strftime_now` returns `today`. Raises UserError if it is not valid Jinja."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_as_text
        )
        self._left = STEPS
        growing = {name: self._not_growing(name, self.filters[name]) for name in _GROWING & self.filters.keys()}
        self.filters.update(growing, tojson=_to_json, counted_=_counted, bounded_=_bounded, text_=_as_text)
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_refuse, strftime_now=today.strftime, namespace=_Namespace)
        if len(source) > LONGEST_SOURCE:
            raise UserError(f"it has {len(source)} characters, more than {LONGEST_SOURCE}")
        try:
            self._template: Template = self.from_string(source)
        except RecursionError as error:
            raise UserError("it is nested too deeply") from error
        except TemplateError as error:
            raise UserError(str(error)) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises UserError with the reason if the template fails on these variables."""
        self._left, size, parts = STEPS, 0, []
        try:
            for part in self._template.generate(**variables):
                size += len(part)
                _check_size(size)
                parts.append(part)
        except RecursionError as error:
            raise UserError("it recurses infinitely") from error
        except Exception as error:  # the template's own expressions can raise anything
            raise UserError(f"{error}" if str(error) else type(error).__name__) from error
        return "".join(parts)

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises TemplateError if they are too many."""
        self._left -= steps
        if self._left < 0:
            raise TemplateError(f"it takes more than {STEPS} loop iterations")

    def bounded(self, value: Any) -> Any:
        """The value, after counting its size. Raises TemplateError if it is too large."""
        if isinstance(value, str | list | tuple):
            size = len(value) * (1 if isinstance(value, str) else ITEM)
            _check_size(size)
            self.spend(size // CHARACTERS_PER_STEP)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Jinja's hook before operators that can make a small value large."""
        if operator == "*":
            counts = [(left, right), (right, left)]
            _check_size(max((len(a) * b for a, b in counts if hasattr(a, "__len__") and isinstance(b, int)), default=0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * max(0, right))
        elif operator == "%" and isinstance(left, str):
            _check_width(left, right if isinstance(right, tuple) else (right,))
        return self.bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as Jinja's own)
        """Jinja's hook before every call."""
        __self.spend(CALL)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, str) and name in _GROWING:
            _check_growth(name, owner, [*args, *kwargs.values()])
        return __self.bounded(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Count the iterations of every loop, and check the size of every assigned value."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = self._through("counted_", loop.iter)
        for assignment in tree.find_all(nodes.Assign):
            assignment.node = self._through("bounded_", assignment.node)
        for joined in tree.find_all(nodes.Concat):
            joined.nodes = [self._through("text_", part) for part in joined.nodes]
        return tree

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        assert isinstance(node, nodes.Expr)
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self)

    @staticmethod
    def _not_growing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)  # also copies the mark by which Jinja knows what the filter receives
        def checked(*args: Any, **kwargs: Any) -> Any:
            text, *others = [value for value in (*args, *kwargs.values()) if not hasattr(value, "autoescape")]
            _check_growth(name, text, others)
            return plain(*args, **kwargs)

        return checked


_GROWING = {"center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "pprint"}
_GROWING |= {"replace", "rjust", "string", "zfill"}
"""Methods and filters whose result may be much larger than their arguments."""


def _check_growth(name: str, text: Any, others: list[Any]) -> None:
    if name == "replace" and isinstance(text, str) and all(isinstance(other, str) for other in others[:2]):
        old, new = others[:2]
        _check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
    elif name == "join":
        parts, glue = (text, others[0] if others else "") if not isinstance(text, str) else (others[0], text)
        if isinstance(parts, list | tuple):
            _check_size(sum(len(str(glue)) + (len(part) if isinstance(part, str) else 1) for part in parts))
    elif not isinstance(text, str):
        _as_text(text)
    else:
        _check_width(text if name.startswith("format") else "", others)


def _check_width(text: str, numbers: Iterable[Any]) -> None:
    if _WIDTH.search(text) or any(isinstance(number, int) and number > 99_999 for number in numbers):
        raise TemplateError("it pads text to 100000 characters or more")


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise TemplateError(f"it makes a value of more than {LARGEST} characters")


def _as_text(value: Any) -> Any:
    """The value as text; an item shared by several lists counts each time."""
    if isinstance(value, list | tuple | dict):
        size, inside = 0, [value]
        while inside:
            item = inside.pop()
            size += len(item) if isinstance(item, str) else ITEM
            _check_size(size)
            if isinstance(item, dict):
                inside += [*item, *item.values()]
            elif isinstance(item, list | tuple):
                inside += item
    return value


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    spend = context.environment.spend  # pyright: ignore
    for item in items:
        spend()
        yield item


@pass_context
def _bounded(context: Context, value: Any) -> Any:
    return context.environment.bounded(value)  # pyright: ignore


class _Namespace(Namespace):
    """Jinja's `namespace` without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805, RUF100  (namespace(self=...) is legal)
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace does not accept {name!r}, which begins with an underscore")


class _Generation(Extension):
    """`{% generation %}`: puts the assistant's text between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012  (jinja reads the class's set)

    def parse(self, parser: Parser) -> nodes.Node:
        """Compile the block to a call."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Like transformers' `tojson`: without the HTML escapes of Jinja's."""
    return json.dumps(_as_text(value), ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> Literal[""]:
    raise TemplateError(message)
