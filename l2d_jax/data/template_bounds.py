"""Limits the time and memory of jinja templates: a chat template is a program that came with a model.

jinja's sandbox keeps a template away from files and processes, but not from using all memory (`{{ 'a' * 10**9 }}`) or
looping forever. Here a rendering has a limited number of steps, and values have a largest size. Before each operator,
call and filter, the environment checks with a meter how large the result may become. `_Counted` adds filters to
everything else that repeats, makes, compares or writes values. A step on a long value counts as several steps. Python's
limits on recursion and on the digits of integers do the rest. A rendering takes at most about ten seconds and 100 MB;
longer conversations may take more, in proportion to their length.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import Template, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS = 2_000_000  # largest number of steps of a rendering
CALL = 8  # steps that a call, macro or filter counts as
SIZE = 2**22  # largest value in characters; an item of a list counts as 16
PER_CHARACTER = 64  # each character of the conversation adds this to both limits
STRIDE = 16  # characters read or written in one step
BITS = 100_000  # largest integer, in bits
TOO_LARGE = "it makes texts, lists or numbers without end: fix it, or take another"
TOO_LONG = "it loops without end: fix it, or take another"


def render_bounded(template: Template, variables: Mapping[str, Any]) -> str:
    """Render a template of a `BoundedEnvironment`; raises jinja's errors, and `OverflowError` at the limits."""
    former = _meter.set(_Meter(variables))
    try:
        return template.render(variables)
    finally:
        _meter.reset(former)


class _Meter:
    """The remaining steps of a rendering, and the sizes of the lists that it uses."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._sizes: dict[int, tuple[int, Any]] = {}  # by id, with the value, so that no other object gets this id
        characters = self._know(given)
        self._left, self._largest = STEPS + PER_CHARACTER * characters, SIZE + PER_CHARACTER * characters

    def _know(self, value: Any) -> int:
        """Register the lists and objects passed to a template, which exist already; returns their size."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        self._sizes[id(value)] = 1 + len(value), value
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return 1 + sum(map(self._know, items))

    def size(self, value: Any) -> int:
        """The size of a value: the characters of a text, or the sum over the items of a list."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3
        if isinstance(value, range):
            return STRIDE * (1 + len(value))
        if isinstance(value, Context) or not isinstance(value, Sequence | Mapping | Set):
            return 1
        if id(value) not in self._sizes:
            items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
            self._sizes[id(value)] = STRIDE * (1 + len(value)) + sum(map(self.size, items)), value
        return self._sizes[id(value)][0]

    def take(self, size: int, *, steps: int = 1) -> None:
        """Count steps on a value of this size."""
        if size > self._largest:
            raise OverflowError(TOO_LARGE)
        self._left -= steps + size // STRIDE
        if self._left < 0:
            raise OverflowError(TOO_LONG)

    def checked(self, value: Any) -> Any:
        """Count a step on a value, and return the value."""
        self.take(self.size(value))
        return value

    def foresee(self, name: str, value: Any, others: Sequence[Any]) -> None:
        """Count a call whose result is at most as large as the product of its arguments (integers: their value)."""
        sizes = [self.size(other) for other in others]
        weights = [abs(other) if isinstance(other, int) else size for other, size in zip(others, sizes, strict=True)]
        if name in ("%", "format", "format_map"):  # widths are in the text, as in '%9d', or arguments, as in '%*d'
            weights += [int(digits[:9]) for digits in re.findall(r"\d+", str(value))]
            widths = [width for other in others if isinstance(other, tuple) for width in other]
            weights += [abs(width) for width in widths if isinstance(width, int)]
        most = BITS if name == "round" else self._largest  # it computes 10 to the power of its argument
        if (1 + self.size(value)) * (1 + sum(weights)) > most:
            raise OverflowError(TOO_LARGE)
        self.take(self.size(value) + sum(sizes), steps=CALL)


_meter: ContextVar[_Meter] = ContextVar("meter")  # meter of the running rendering; unset during compilation


def _bounded(value: Any) -> Any:
    """The filter added to values that are made, compared or written."""
    return _meter.get().checked(value)


def _walked(value: Any) -> Any:
    """The filter added to the iterable of a loop with a condition, whose body may never run."""
    value = list(value) if isinstance(value, Iterator) else value
    _meter.get().take(STRIDE * len(value))
    return value


def _step(size: int) -> None:
    """The filter added to the body of a loop or macro, which is repeated; `size` is its number of characters."""
    _meter.get().take(size)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates check with the meter; intercepted operators are not evaluated at compile time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def count_filters(self) -> None:
        """Make all filters check with the meter; call this once, after all filters were added."""
        counted = {name: _counted_filter(name, function) for name, function in self.filters.items()}
        self.filters |= counted | {"bounded": _bounded, "walked": _walked, "step": _step}

    def compile_bounded(self, source: str) -> Template:
        """Compile a template that checks with the meter; raises jinja's errors."""
        tree: Any = _Counted().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def wrap_str_format(self, value: Any) -> Any:
        """The sandbox's version of `str.format`, if `value` is that method; widths from arguments are refused."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(value.__self__)):
            raise OverflowError(TOO_LARGE)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator of a template; raises `OverflowError`."""
        bits = [value.bit_length() if isinstance(value, int) else 0 for value in (left, right)]
        if isinstance(left, int) and isinstance(right, int):
            if (bits[0] * right if operator == "**" else sum(bits)) > BITS:
                raise OverflowError(TOO_LARGE)
        elif operator == "+":
            _meter.get().take(_meter.get().size(left) + _meter.get().size(right))
        else:
            _meter.get().foresee(operator, left, [right])
        return _bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja)
        """Evaluate a call of a method or macro; raises `OverflowError`."""
        method, others = getattr(__obj, "__wrapped__", __obj), [*args, *kwargs.values()]  # jinja wraps `format`
        _meter.get().foresee(getattr(method, "__name__", ""), getattr(method, "__self__", None), others)
        return _bounded(super().call(__context, __obj, *args, **kwargs))


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A jinja filter that first checks with the meter; lazy results are computed immediately."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the context

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        first, others = args[place], [*args[place + 1 :], *kwargs.values()]
        if isinstance(first, Iterator):
            first = list(first)
        _meter.get().foresee(name, first, others)
        result = function(*args[:place], first, *args[place + 1 :], **kwargs)
        return iter(_bounded(list(result))) if isinstance(result, Iterator) else _bounded(result)

    return counted


class _Counted(NodeTransformer):
    """Adds the filters `bounded`, `walked` and `step` to a parsed template."""

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        """Visit the parts of a node, then add filters to it."""
        self.generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "walked" if node.test else "bounded")
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):  # its body is repeated
            texts = [one.data for part in node.body for one in part.find_all(nodes.TemplateData)]
            texts += [str(one.value) for part in node.body for one in part.find_all(nodes.Const)]
            step = _filtered(nodes.Const(sum(map(len, texts)), lineno=node.lineno), "step")
            node.body = [nodes.ExprStmt(step, lineno=node.lineno), *node.body]
        elif isinstance(node, nodes.Output):  # constant text is written once, or counted with the loop around it
            node.nodes = [one if isinstance(one, nodes.TemplateData) else _filtered(one) for one in node.nodes]
        elif isinstance(node, nodes.Compare):
            node.expr = _filtered(node.expr)
            for operand in node.ops:
                operand.expr = _filtered(operand.expr)
        elif isinstance(node, nodes.Test):
            node.node = _filtered(node.node)
        elif isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Concat):
            return node if getattr(node, "ctx", "load") == "store" else _filtered(node)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filtered(node)
        return node


def _filtered(node: Any, name: str = "bounded") -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
