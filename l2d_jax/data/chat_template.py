"""Renders chat templates as transformers does, within bounds (`template_bounds`), and with the same result every day.

`strftime_now` always formats `DATE`, and nothing is random.
"""

import datetime as dt
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.parser import Parser
from jinja2.utils import Namespace

from l2d_jax.data.template_bounds import BoundedEnvironment, render_bounded

DATE = dt.datetime(2024, 7, 26)  # Llama 3's templates print a date; today's date would change the data every day


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template; raises whatever jinja and the template raise, and `OverflowError` beyond the bounds."""
    return render_bounded(_compile(template), variables)


@lru_cache(maxsize=16)
def names_in(template: str) -> frozenset[str]:
    """The variable names in a template, such as `messages` and `tools`; raises jinja's errors."""
    return frozenset(name.name for name in _environment().parse(template).find_all(nodes.Name))


class _Generation(ext.Extension):
    """The tag `{% generation %}`, which marks the assistant's part of a text and writes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """Read the tag and its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body, lineno=line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` for templates, which gives no access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates: without private names, and with a short repr whatever it contains."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _check_public(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no private names, got {name!r}")


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: FBT001, FBT002 (as transformers')
    """`tojson` as in transformers: without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@lru_cache(maxsize=1)
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    del environment.filters["random"], environment.globals["lipsum"]
    environment.count_filters()
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": DATE.strftime}
    environment.globals |= {"dict": _Dict(), "namespace": _Namespace}
    return environment


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    return _environment().compile_bounded(template)
