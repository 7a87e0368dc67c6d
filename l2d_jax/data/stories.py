"""The stories of the built-in word problems: templates, each a question and its worked solution."""

from dataclasses import dataclass
from random import Random

SHE = "Amara Bianca Chloe Dalia Elif Freya Greta Hana Ines Jana Kira Lena Mei Nora Olga Priya"
HE = "Arlo Boris Cem Diego Emil Felix Goran Hugo Ivan Jonas Kofi Luca Milo Nils Oscar Pavel"
THINGS = "pencils stickers marbles buttons cards shells stamps beads badges coins crayons ribbons"
FRUITS = "apples oranges plums cherries peaches figs pears lemons limes grapes berries melons"
BAKES = "cookies muffins pancakes pretzels rolls waffles cakes pies buns tarts"
GOODS = "notebook lamp kite puzzle scarf backpack helmet racket clock teapot blanket skateboard"
PLACES = "garden yard hall field terrace classroom workshop playground"
RIDES = "bus train tram ferry coach"


@dataclass(frozen=True)
class Cast:
    """Two people and the nouns of a story."""

    name: str
    they: str  # "she" or "he", for `name`
    friend: str
    thing: str
    fruit: str
    bake: str
    good: str
    place: str
    ride: str


Story = tuple[str, str]  # a question, and a solution whose last number is the answer


def cast(r: Random) -> Cast:
    """People and nouns, drawn at random."""
    they, names = r.choice((("she", SHE), ("he", HE)))
    name = r.choice(names.split())
    friend = r.choice([other for other in f"{SHE} {HE}".split() if other != name])
    words = (r.choice(words.split()) for words in (THINGS, FRUITS, BAKES, GOODS, PLACES, RIDES))
    return Cast(name, they, friend, *words)


def _shopping(r: Random, c: Cast) -> Story:
    count, price = r.randint(2, 15), r.randint(3, 20)
    cost = count * price
    paid = next(amount for amount in (20, 50, 100, 200, 500) if amount - cost > 1)
    return (
        f"{c.name} buys {count} boxes of {c.thing} for {price} dollars each and pays with {paid} dollars. "
        f"How many dollars does {c.they} get back?",
        f"The boxes cost {count} * {price} = {cost} dollars. "
        f"{c.name} gets back {paid} - {cost} = {paid - cost} dollars.",
    )


def _gift(r: Random, c: Cast) -> Story:
    bags, each = r.randint(2, 9), r.randint(4, 20)
    total = bags * each
    given = r.randint(2, total - 1)
    return (
        f"{c.name} has {bags} bags with {each} {c.fruit} in each bag. {c.they.title()} gives {given} {c.fruit} to "
        f"{c.friend}. How many {c.fruit} does {c.name} have left?",
        f"{c.name} starts with {bags} * {each} = {total} {c.fruit}. "
        f"After the gift that is {total} - {given} = {total - given}.",
    )


def _journey(r: Random, c: Cast) -> Story:
    speed, hours, rest = 5 * r.randint(4, 20), r.randint(2, 8), r.randint(5, 95)
    far = speed * hours
    return (
        f"A {c.ride} goes {speed} kilometers per hour for {hours} hours and then another {rest} kilometers. "
        f"How many kilometers does it travel in total?",
        f"In {hours} hours it covers {speed} * {hours} = {far} kilometers. "
        f"The whole trip is {far} + {rest} = {far + rest} kilometers.",
    )


def _sharing(r: Random, c: Cast) -> Story:
    friends, each, kept = r.randint(2, 9), r.randint(3, 15), r.randint(2, 12)
    shared = friends * each
    return (
        f"{c.name} picks {shared + kept} {c.fruit}, keeps {kept} and shares the rest equally among {friends} friends. "
        f"How many {c.fruit} does each friend get?",
        f"There are {shared + kept} - {kept} = {shared} {c.fruit} to share. "
        f"Each friend gets {shared} / {friends} = {each}.",
    )


def _ages(r: Random, c: Cast) -> Story:
    young, times, years = r.randint(3, 15), r.randint(2, 5), r.randint(2, 20)
    old = young * times
    return (
        f"{c.name} is {young} years old, and {c.friend} is {times} times as old. "
        f"How old will {c.friend} be in {years} years?",
        f"{c.friend} is {young} * {times} = {old} years old now. "
        f"In {years} years that is {old} + {years} = {old + years}.",
    )


def _area(r: Random, c: Cast) -> Story:
    long, side = r.randint(7, 25), r.randint(2, 5)
    wide = r.randint(6, long)
    whole, square = long * wide, side * side
    return (
        f"A {c.place} is {long} meters long and {wide} meters wide. {c.name} paints a square of it with sides of "
        f"{side} meters. How many square meters are not painted?",
        f"The {c.place} has {long} * {wide} = {whole} square meters. The square has {side} * {side} = {square}. "
        f"That leaves {whole} - {square} = {whole - square}.",
    )


def _fence(r: Random, c: Cast) -> Story:
    long, price = r.randint(5, 30), r.randint(2, 9)
    half = long + (wide := r.randint(3, long))
    return (
        f"{c.name} builds a fence around a {c.place} that is {long} meters long and {wide} meters wide. One meter "
        f"costs {price} dollars. How many dollars does the fence cost?",
        f"Two sides are {long} + {wide} = {half} meters, so all four are 2 * {half} = {2 * half}. "
        f"That costs {2 * half} * {price} = {2 * half * price} dollars.",
    )


def _savings(r: Random, c: Cast) -> Story:
    start, weekly, weeks = r.randint(5, 40), r.randint(3, 15), r.randint(2, 12)
    missing = weekly * weeks
    return (
        f"{c.name} has {start} dollars and saves {weekly} dollars a week for a {c.good} that costs {start + missing} "
        f"dollars. How many weeks does {c.they} have to save?",
        f"{c.name} needs {start + missing} - {start} = {missing} more dollars. "
        f"That takes {missing} / {weekly} = {weeks} weeks.",
    )


def _recipe(r: Random, c: Cast) -> Story:
    flour, milk, times = r.randint(2, 12), r.randint(2, 12), r.randint(2, 9)
    return (
        f"A recipe for {c.bake} mixes {flour} cups of flour with {milk} cups of milk. {c.name} uses {flour * times} "
        f"cups of flour. How many cups of milk does {c.they} need?",
        f"{c.name} makes the recipe {flour * times} / {flour} = {times} times. "
        f"That needs {milk} * {times} = {milk * times} cups of milk.",
    )


def _sale(r: Random, c: Cast) -> Story:
    price, percent = 20 * r.randint(2, 20), 5 * r.randint(1, 15)
    off = price * percent // 100  # exact: 20 * 5 is 100
    return (
        f"A {c.good} costs {price} dollars. In a sale its price falls by {percent} percent. "
        f"How many dollars does {c.name} pay for it in the sale?",
        f"The price falls by {price} * {percent} / 100 = {off} dollars. "
        f"{c.name} pays {price} - {off} = {price - off} dollars.",
    )


def _days(r: Random, c: Cast) -> Story:
    first = r.randint(4, 40)
    fewer = r.randint(2, min(2 * first - 1, 20))
    double, third = 2 * first, 2 * first - fewer
    total = first + double + third
    return (
        f"{c.name} sells {first} {c.bake} on Monday, twice as many on Tuesday, and on Wednesday {fewer} fewer than on "
        f"Tuesday. How many {c.bake} is that in total?",
        f"Tuesday brings 2 * {first} = {double} and Wednesday {double} - {fewer} = {third}. "
        f"The total is {first} + {double} + {third} = {total}.",
    )


def _wages(r: Random, c: Cast) -> Story:
    wage, hours, days = r.randint(8, 20), r.randint(2, 8), r.randint(2, 6)
    daily = wage * hours
    earned, price = daily * days, r.randint(5, min(daily, 99))
    return (
        f"{c.name} earns {wage} dollars an hour and works {hours} hours a day for {days} days. Then {c.they} buys a "
        f"{c.good} for {price} dollars. How many dollars are left?",
        f"A day pays {wage} * {hours} = {daily} and {days} days pay {daily} * {days} = {earned} dollars. "
        f"After that there are {earned} - {price} = {earned - price}.",
    )


def _leftover(r: Random, c: Cast) -> Story:
    size, full = r.randint(3, 12), r.randint(3, 12)
    packed, left = size * full, r.randint(0, size - 1)
    return (
        f"{c.name} packs {packed + left} {c.thing} into boxes of {size} and fills as many boxes as possible. "
        f"How many {c.thing} are left over?",
        f"{c.name} fills {full} boxes with {full} * {size} = {packed} {c.thing}. "
        f"The rest is {packed + left} - {packed} = {left}.",
    )


def _passengers(r: Random, c: Cast) -> Story:
    start, off, on, price = r.randint(12, 50), r.randint(2, 11), r.randint(2, 20), r.randint(2, 6)
    riders = start - off + on
    return (
        f"{start} people sit in a {c.ride}. At a stop {off} people get off and {on} get on. Everyone who is then in "
        f"the {c.ride} pays {price} dollars. How many dollars is that?",
        f"After the stop there are {start} - {off} + {on} = {riders} people. "
        f"They pay {riders} * {price} = {riders * price} dollars.",
    )


TEMPLATES = (
    *(_shopping, _gift, _journey, _sharing, _ages, _area, _fence),
    *(_savings, _recipe, _sale, _days, _wages, _leftover, _passengers),
)
