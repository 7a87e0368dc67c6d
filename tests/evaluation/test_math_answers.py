"""The strict rules of MATH: boxes, notation, and comparing."""

import pytest

from l2d_jax.evaluation.tasks.math import boxed, extract, is_same, rewrite


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\!1\n2", "12"),
        ("\\tfrac{1}{2}", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\frac{1}2", "\\frac{1}2"),
        ("\\frac1", "\\frac1"),
        ("\\frac{a}{b}\\frac12", "\\frac{a}{b}\\frac{1}{2}"),
        ("\\frac1\\frac12", "\\frac1\\frac12"),  # the first has too little behind it, so all stay
        ("\\sqrt3 + \\sqrt{5}", "\\sqrt{3}+\\sqrt{5}"),
        ("90^\\circ", "90"),
        ("90^{\\circ}", "90"),
        ("\\$5.00", "5.00"),
        ("5\\text{ cm}^2", "5"),
        ("\\text{no}", "\\text{no}"),
        ("x=3", "3"),
        ("abc=3", "abc=3"),
        ("a=b=3", "a=b=3"),
        (".5", "\\frac{1}{2}"),
        ("{.5}", "{0.5}"),
        ("-1/3", "\\frac{-1}{3}"),
        ("01/3", "01/3"),
        ("a/b", "a/b"),
        ("12_{3}", "12_3"),
        ("1,000", "1000"),
        ("f(1,2)", "f(1,2)"),
        ("", ""),
        ("\\sqrt", None),
        ("2\\frac", None),
    ],
)
def test_answers_are_rewritten(text: str, expected: str | None) -> None:
    assert rewrite(text) == expected


def test_boxes() -> None:
    assert boxed("\\boxed{1} \\boxed{{2}}") == "\\boxed{{2}}"
    assert boxed("\\boxed{1} \\boxed{2") is None  # the last is not closed
    assert boxed("\\boxed{1} \\fbox{2}") == "\\boxed{1}"
    assert boxed("}{1}") is None
    assert extract("\\boxed{1} \\boxed{2") == 2.0
    assert extract("\\boxed 3 {4}") is None
    assert extract("1,234.50") == 234.5
    assert extract("none") is None


def test_numbers_and_fractions_are_compared() -> None:
    assert is_same("5.0", "5")
    assert is_same(3.0, "\\frac{6}{2}")
    assert not is_same("\\frac{1}{2}", "\\frac{2}{4}")  # both are text
    assert not is_same("\\frac{1}{x}", 0.5)
    assert not is_same("nan", "nan2")
    assert not is_same("\\frac{1}{2}", "nan")
    assert not is_same("\\frac{1}{" + "9" * 400 + "}", 0.5)
