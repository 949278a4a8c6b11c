"""Pairs of phrases in two languages, generated from the Unicode locale data (CLDR) that Babel brings.

A phrase is drawn once (a date and how to write it, an amount of money, a list of countries) and written in both
languages by the rules of each: order of the parts, plurals, separators, names. No network, any two locales.
"""

import datetime as dt
from collections.abc import Callable, Sequence
from decimal import Decimal
from random import Random
from typing import Any, TypeVar

from babel import Locale, UnknownLocaleError
from babel.core import get_global
from babel.dates import format_date, format_datetime, format_skeleton, format_time, format_timedelta
from babel.lists import format_list
from babel.numbers import format_compact_decimal, format_currency, format_decimal, format_percent
from babel.units import format_unit

Phrase = Callable[[Locale], str]
T = TypeVar("T")

DAYS = 73_000  # from 1900 on: two hundred years
DATE_STYLES = ("short", "medium", "long", "full")
SKELETONS = ("yMMMM", "MMMMd", "yMMMEd", "MMMEd", "yMMM", "yQQQQ")
DURATIONS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
UNITS = (
    *("length-kilometer", "length-meter", "length-centimeter", "length-millimeter", "length-mile", "length-foot"),
    *("length-inch", "area-square-kilometer", "area-square-meter", "area-hectare", "volume-liter", "volume-gallon"),
    *("volume-cubic-meter", "volume-milliliter", "mass-kilogram", "mass-gram", "mass-pound", "mass-ounce"),
    *("temperature-celsius", "temperature-fahrenheit", "speed-kilometer-per-hour", "speed-mile-per-hour"),
    *("speed-meter-per-second", "duration-second", "duration-minute", "duration-hour", "duration-day"),
    *("duration-week", "duration-month", "duration-year", "digital-megabyte", "digital-gigabyte"),
    *("energy-kilowatt-hour", "power-watt", "frequency-hertz", "angle-degree", "electric-volt", "electric-ampere"),
)
TRIES = 60  # draws for every pair wanted, before the locales are given up as too poor


def parse_locale(name: str) -> Locale:
    try:
        return Locale.parse(name.replace("-", "_"))
    except (UnknownLocaleError, ValueError, TypeError):
        raise ValueError(f"Babel knows no locale {name!r}: give one like en, de, pt_BR or zh_Hant") from None


def generate_pairs(source: str, target: str, count: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs (source, target), drawn by `seed`; no source text and no target text occurs twice.

    A shorter list of the same seed is the beginning of a longer one.
    """
    here, there = parse_locale(source), parse_locale(target)
    if str(here) == str(there):
        raise ValueError(f"source and target are both {source!r}: choose two languages")
    phrases = Phrases(here, there, seed)
    pairs: dict[str, str] = {}
    targets: set[str] = set()
    for _ in range(TRIES * count):
        if len(pairs) == count:
            break
        phrase = phrases.draw()
        pair = clean(phrase(here)), clean(phrase(there))
        if all(pair) and pair[0] not in pairs and pair[1] not in targets:
            pairs[pair[0]] = pair[1]
            targets.add(pair[1])
    if len(pairs) < count:
        raise ValueError(f"{source} and {target} give only {len(pairs)} different phrases, {count} are asked for")
    return list(pairs.items())


def clean(text: str) -> str:
    """One line with plain single spaces; CLDR also uses narrow and non-breaking ones."""
    return " ".join(text.split())


class Phrases:
    """Draws phrases that both locales can write."""

    def __init__(self, source: Locale, target: Locale, seed: int) -> None:
        # Only `Random.random` is promised to give the same numbers in every version of Python.
        self.random = Random(seed).random
        territories = _shared(source.territories, target.territories)
        self.names = [
            names
            for names in (
                ("territories", [code for code in territories if code.isalpha()]),
                ("languages", _shared(source.languages, target.languages)),
                ("currencies", _shared(source.currencies, target.currencies)),
            )
            if names[1]
        ]
        self.money = [code for code in _shared(source.currencies, target.currencies) if code in _current_currencies()]
        self.skeletons = [name for name in SKELETONS if _in_both("datetime_skeletons", name, source, target)]
        kinds: dict[Callable[[], Phrase], int] = {
            self.date: 20,
            self.time: 6,
            self.moment: 10,
            self.number: 12,
            self.percent: 4,
            self.quantity: 16,
            self.duration: 5,
            self.several: 15,
        }
        if _in_both("compact_decimal_formats", "long", source, target):
            kinds[self.compact] = 4
        if self.money:
            kinds[self.amount] = 12
        if self.names:
            kinds[self.listed_names] = 16
        self.kinds = [kind for kind, weight in kinds.items() for _ in range(weight)]
        self.simple = [kind for kind in self.kinds if kind not in (self.several, self.listed_names)]

    def draw(self) -> Phrase:
        return self.one(self.kinds)()

    def below(self, count: int) -> int:
        return int(self.random() * count)

    def one(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def value(self) -> Decimal:
        """A number of up to seven digits, half of them whole."""
        whole = self.below(10 ** (1 + self.below(7)))
        digits = self.one((0, 0, 1, 2))
        return Decimal(whole) if not digits else (Decimal(whole) / 10**digits).normalize()

    def date(self) -> Phrase:
        day = dt.date(1900, 1, 1) + dt.timedelta(days=self.below(DAYS))
        if self.skeletons and self.below(4) == 0:
            skeleton = self.one(self.skeletons)
            moment = dt.datetime.combine(day, dt.time())
            return lambda locale: format_skeleton(skeleton, moment, fuzzy=False, locale=locale)
        style: Any = self.one(DATE_STYLES)
        return lambda locale: format_date(day, style, locale=locale)

    def time(self) -> Phrase:
        time = dt.time(self.below(24), self.below(60), self.below(60))
        style: Any = self.one(("short", "medium"))
        return lambda locale: format_time(time, style, locale=locale)

    def moment(self) -> Phrase:
        moment = dt.datetime(1900, 1, 1) + dt.timedelta(days=self.below(DAYS), minutes=self.below(1440))
        style: Any = self.one(("short", "medium"))
        return lambda locale: format_datetime(moment, style, locale=locale)

    def number(self) -> Phrase:
        value = self.value() * self.one((1, 1, 1, -1))
        return lambda locale: format_decimal(value, locale=locale)

    def compact(self) -> Phrase:
        value = (10 + self.below(9990)) * 10 ** (2 + self.below(8))
        return lambda locale: format_compact_decimal(value, format_type="long", locale=locale, fraction_digits=1)

    def percent(self) -> Phrase:
        value = Decimal(self.below(2000)) / 1000
        return lambda locale: format_percent(value, decimal_quantization=False, locale=locale)

    def quantity(self) -> Phrase:
        value, unit = self.value(), self.one(UNITS)
        length: Any = self.one(("long", "long", "short"))
        return lambda locale: format_unit(value, unit, length, locale=locale)

    def duration(self) -> Phrase:
        seconds = (1 + self.below(59)) * DURATIONS[self.one(tuple(DURATIONS))]
        delta = dt.timedelta(seconds=seconds if self.below(2) else -seconds)
        return lambda locale: format_timedelta(delta, threshold=1.2, add_direction=True, locale=locale)

    def amount(self) -> Phrase:
        value, currency = Decimal(self.below(10 ** (3 + self.below(6)))) / 100, self.one(self.money)
        style: Any = self.one(("name", "standard"))
        return lambda locale: format_currency(value, currency, locale=locale, format_type=style)

    def listed_names(self) -> Phrase:
        kind, codes = self.one(self.names)
        chosen = [self.one(codes) for _ in range(1 + self.below(4))]
        style: Any = self.one(("standard", "standard", "or"))
        return lambda locale: format_list([getattr(locale, kind)[code] for code in chosen], style, locale=locale)

    def several(self) -> Phrase:
        """A list of two to four phrases of other kinds."""
        parts = [self.one(self.simple)() for _ in range(2 + self.below(3))]
        return lambda locale: format_list([part(locale) for part in parts], locale=locale)


def _shared(here: Any, there: Any) -> list[str]:
    """Keys that both locales have a name for, in a fixed order."""
    return sorted(key for key in here if here[key] and there.get(key))


def _in_both(table: str, key: str, *locales: Locale) -> bool:
    return all(key in getattr(locale, table) for locale in locales)


def _current_currencies() -> set[str]:
    """Codes of currencies that are legal tender somewhere today."""
    return {
        code
        for entries in get_global("territory_currencies").values()
        for code, _, end, tender in entries
        if end is None and tender
    }
