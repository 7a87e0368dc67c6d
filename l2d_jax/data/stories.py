"""The stories of the built-in word problems: their numbers; `stories.toml` has their texts, and names and nouns."""

from collections.abc import Callable
from random import Random

from l2d_jax.files import package_table

NOUNS = ("thing", "fruit", "bake", "good", "place", "ride")
Numbers = dict[str, int]


def tell(story: Callable[[Random], Numbers], r: Random) -> tuple[str, str]:
    """The question of one of `STORIES`, drawn at random, and a solution whose last number is the answer.

    They are of two people, of whom `they` is the first, and a noun of each kind.
    """
    texts = package_table("data/stories.toml")
    text, words = texts[story.__name__.removeprefix("_")], texts["words"]
    they = r.choice(("she", "he"))
    name = r.choice(words[they].split())
    friend = r.choice([other for other in f"{words['she']} {words['he']}".split() if other != name])
    people = {"name": name, "they": they, "They": they.title(), "friend": friend}
    filled = people | {noun: r.choice(words[noun].split()) for noun in NOUNS} | story(r)
    return text["question"].format_map(filled), text["solution"].format_map(filled)


def _shopping(r: Random) -> Numbers:
    count, price = r.randint(2, 15), r.randint(3, 20)
    cost = count * price
    paid = next(amount for amount in (20, 50, 100, 200, 500) if amount - cost > 1)
    return {"count": count, "price": price, "cost": cost, "paid": paid, "back": paid - cost}


def _gift(r: Random) -> Numbers:
    bags, each = r.randint(2, 9), r.randint(4, 20)
    total = bags * each
    given = r.randint(2, total - 1)
    return {"bags": bags, "each": each, "total": total, "given": given, "left": total - given}


def _journey(r: Random) -> Numbers:
    speed, hours, rest = 5 * r.randint(4, 20), r.randint(2, 8), r.randint(5, 95)
    far = speed * hours
    return {"speed": speed, "hours": hours, "rest": rest, "far": far, "trip": far + rest}


def _sharing(r: Random) -> Numbers:
    friends, each, kept = r.randint(2, 9), r.randint(3, 15), r.randint(2, 12)
    shared = friends * each
    return {"friends": friends, "each": each, "kept": kept, "shared": shared, "picked": shared + kept}


def _ages(r: Random) -> Numbers:
    young, times, years = r.randint(3, 15), r.randint(2, 5), r.randint(2, 20)
    old = young * times
    return {"young": young, "times": times, "years": years, "old": old, "older": old + years}


def _area(r: Random) -> Numbers:
    long, side = r.randint(7, 25), r.randint(2, 5)
    wide = r.randint(6, long)
    whole, square = long * wide, side * side
    return {"long": long, "side": side, "wide": wide, "whole": whole, "square": square, "left": whole - square}


def _fence(r: Random) -> Numbers:
    long, price = r.randint(5, 30), r.randint(2, 9)
    wide = r.randint(3, long)
    half = long + wide
    return {"long": long, "price": price, "wide": wide, "half": half, "around": 2 * half, "cost": 2 * half * price}


def _savings(r: Random) -> Numbers:
    start, weekly, weeks = r.randint(5, 40), r.randint(3, 15), r.randint(2, 12)
    missing = weekly * weeks
    return {"start": start, "weekly": weekly, "weeks": weeks, "missing": missing, "price": start + missing}


def _recipe(r: Random) -> Numbers:
    flour, milk, times = r.randint(2, 12), r.randint(2, 12), r.randint(2, 9)
    return {"flour": flour, "milk": milk, "times": times, "used": flour * times, "needed": milk * times}


def _sale(r: Random) -> Numbers:
    price, percent = 20 * r.randint(2, 20), 5 * r.randint(1, 15)
    off = price * percent // 100  # exact: 20 * 5 is 100
    return {"price": price, "percent": percent, "off": off, "paid": price - off}


def _days(r: Random) -> Numbers:
    first = r.randint(4, 40)
    double, fewer = 2 * first, r.randint(2, min(2 * first - 1, 20))
    third = double - fewer
    return {"first": first, "double": double, "fewer": fewer, "third": third, "total": first + double + third}


def _wages(r: Random) -> Numbers:
    wage, hours, days = r.randint(8, 20), r.randint(2, 8), r.randint(2, 6)
    daily = wage * hours
    pay = {"wage": wage, "hours": hours, "days": days, "daily": daily, "earned": daily * days}
    price = r.randint(5, min(daily, 99))
    return pay | {"price": price, "left": daily * days - price}


def _leftover(r: Random) -> Numbers:
    size, full = r.randint(3, 12), r.randint(3, 12)
    packed, left = size * full, r.randint(0, size - 1)
    return {"size": size, "full": full, "packed": packed, "left": left, "all": packed + left}


def _passengers(r: Random) -> Numbers:
    start, off, on, price = r.randint(12, 50), r.randint(2, 11), r.randint(2, 20), r.randint(2, 6)
    riders = start - off + on
    return {"start": start, "off": off, "on": on, "price": price, "riders": riders, "paid": riders * price}


STORIES: tuple[Callable[[Random], Numbers], ...] = (
    *(_shopping, _gift, _journey, _sharing, _ages, _area, _fence),
    *(_savings, _recipe, _sale, _days, _wages, _leftover, _passengers),
)
