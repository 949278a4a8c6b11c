"""Generates pairs of phrases in two languages from the Unicode locale data (CLDR) in the package Babel.

A phrase (a date and its style, an amount of money, a list of countries) is drawn once and written in both languages by
the rules of each: order of the parts, plurals, separators, names. Any two locales of Babel work.
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

DAYS = 73_000  # two hundred years from 1900 on
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
TRIES = 60  # phrases drawn for each pair that is wanted, before an error says that the locales are too poor


def parse_locale(name: str) -> Locale:
    try:
        return Locale.parse(name.replace("-", "_"))
    except (UnknownLocaleError, ValueError, TypeError):
        raise ValueError(f"Babel knows no locale {name!r}: give one like en, de, pt_BR or zh_Hant") from None


def generate_pairs(source: str, target: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Returns `count` random pairs (source, target). No source text and no target text occurs twice.

    With the same seed, a shorter list is the beginning of a longer one.
    """
    source_locale, target_locale = parse_locale(source), parse_locale(target)
    if str(source_locale) == str(target_locale):
        raise ValueError(f"source and target are both {source!r}: choose two languages")
    phrases = PhraseGenerator(source_locale, target_locale, seed)
    pairs: dict[str, str] = {}
    targets: set[str] = set()
    for _ in range(TRIES * count):
        if len(pairs) == count:
            break
        phrase = phrases.draw()
        pair = clean(phrase(source_locale)), clean(phrase(target_locale))
        if all(pair) and pair[0] not in pairs and pair[1] not in targets:
            pairs[pair[0]] = pair[1]
            targets.add(pair[1])
    if len(pairs) < count:
        raise ValueError(f"{source} and {target} give only {len(pairs)} different phrases, but {count} are asked for")
    return list(pairs.items())


def clean(text: str) -> str:
    """Returns the text with single plain spaces; CLDR also uses narrow and non-breaking spaces."""
    return " ".join(text.split())


class PhraseGenerator:
    """Draws random phrases that both locales can write."""

    def __init__(self, source: Locale, target: Locale, seed: int) -> None:
        # Python promises the same numbers in every version only for `Random.random`.
        self.random = Random(seed).random
        territories = _shared_keys(source.territories, target.territories)
        self.names = [
            names
            for names in (
                ("territories", [code for code in territories if code.isalpha()]),
                ("languages", _shared_keys(source.languages, target.languages)),
                ("currencies", _shared_keys(source.currencies, target.currencies)),
            )
            if names[1]
        ]
        self.money = [
            code for code in _shared_keys(source.currencies, target.currencies) if code in _current_currencies()
        ]
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
        return self.choice(self.kinds)()

    def below(self, count: int) -> int:
        """Returns a random number from 0 to count - 1."""
        return int(self.random() * count)

    def choice(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def value(self) -> Decimal:
        """Returns a random number of up to seven digits. Half of these numbers are whole."""
        whole = self.below(10 ** (1 + self.below(7)))
        digits = self.choice((0, 0, 1, 2))
        return Decimal(whole) if not digits else (Decimal(whole) / 10**digits).normalize()

    def date(self) -> Phrase:
        day = dt.date(1900, 1, 1) + dt.timedelta(days=self.below(DAYS))
        if self.skeletons and self.below(4) == 0:
            skeleton = self.choice(self.skeletons)
            moment = dt.datetime.combine(day, dt.time())
            return lambda locale: format_skeleton(skeleton, moment, fuzzy=False, locale=locale)
        style: Any = self.choice(DATE_STYLES)
        return lambda locale: format_date(day, style, locale=locale)

    def time(self) -> Phrase:
        time = dt.time(self.below(24), self.below(60), self.below(60))
        style: Any = self.choice(("short", "medium"))
        return lambda locale: format_time(time, style, locale=locale)

    def moment(self) -> Phrase:
        moment = dt.datetime(1900, 1, 1) + dt.timedelta(days=self.below(DAYS), minutes=self.below(1440))
        style: Any = self.choice(("short", "medium"))
        return lambda locale: format_datetime(moment, style, locale=locale)

    def number(self) -> Phrase:
        value = self.value() * self.choice((1, 1, 1, -1))
        return lambda locale: format_decimal(value, locale=locale)

    def compact(self) -> Phrase:
        value = (10 + self.below(9990)) * 10 ** (2 + self.below(8))
        return lambda locale: format_compact_decimal(value, format_type="long", locale=locale, fraction_digits=1)

    def percent(self) -> Phrase:
        value = Decimal(self.below(2000)) / 1000
        return lambda locale: format_percent(value, decimal_quantization=False, locale=locale)

    def quantity(self) -> Phrase:
        value, unit = self.value(), self.choice(UNITS)
        length: Any = self.choice(("long", "long", "short"))
        return lambda locale: format_unit(value, unit, length, locale=locale)

    def duration(self) -> Phrase:
        seconds = (1 + self.below(59)) * DURATIONS[self.choice(tuple(DURATIONS))]
        delta = dt.timedelta(seconds=seconds if self.below(2) else -seconds)
        return lambda locale: format_timedelta(delta, threshold=1.2, add_direction=True, locale=locale)

    def amount(self) -> Phrase:
        value, currency = Decimal(self.below(10 ** (3 + self.below(6)))) / 100, self.choice(self.money)
        style: Any = self.choice(("name", "standard"))
        return lambda locale: format_currency(value, currency, locale=locale, format_type=style)

    def listed_names(self) -> Phrase:
        kind, codes = self.choice(self.names)
        chosen = [self.choice(codes) for _ in range(1 + self.below(4))]
        style: Any = self.choice(("standard", "standard", "or"))
        return lambda locale: format_list([getattr(locale, kind)[code] for code in chosen], style, locale=locale)

    def several(self) -> Phrase:
        """Returns a list of two to four phrases of other kinds."""
        parts = [self.choice(self.simple)() for _ in range(2 + self.below(3))]
        return lambda locale: format_list([part(locale) for part in parts], locale=locale)


def _shared_keys(first: Any, second: Any) -> list[str]:
    """Returns the keys that both locales have a name for, in a fixed order."""
    return sorted(key for key in first if first[key] and second.get(key))


def _in_both(table: str, key: str, *locales: Locale) -> bool:
    return all(key in getattr(locale, table) for locale in locales)


def _current_currencies() -> set[str]:
    """Returns the codes of the currencies that are legal tender somewhere today."""
    return {
        code
        for entries in get_global("territory_currencies").values()
        for code, _, end, tender in entries
        if end is None and tender
    }
