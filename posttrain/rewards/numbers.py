"""Numbers as people write them, read exactly: digits, fractions, powers of ten, percent signs, units, English words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Quantity", "parse_number", "same_number"]

ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SMALL = {word: number for number, word in enumerate(ONES + TEENS)} | {
    word: 10 * number for number, word in enumerate(TENS, start=2)
}
LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
ORDINALS = ("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
PARTS = (
    {"half": 2, "halves": 2, "quarter": 4, "quarters": 4}
    | {name + plural: number for number, name in enumerate(ORDINALS, start=3) for plural in ("", "s")}
    | {"hundredth": 100, "hundredths": 100, "thousandth": 1000, "thousandths": 1000}
)

UNITS = {
    unit: names[0]
    for names in (
        ("mm", "millimeter", "millimeters", "millimetre", "millimetres"),
        ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
        ("m", "meter", "meters", "metre", "metres"),
        ("km", "kilometer", "kilometers", "kilometre", "kilometres"),
        ("in", "inch", "inches"),
        ("ft", "foot", "feet"),
        ("mi", "mile", "miles"),
        ("mg", "milligram", "milligrams"),
        ("g", "gram", "grams"),
        ("kg", "kilogram", "kilograms"),
        ("lb", "lbs", "pound", "pounds"),
        ("l", "liter", "liters", "litre", "litres"),
        ("ml", "milliliter", "milliliters", "millilitre", "millilitres"),
        ("s", "sec", "second", "seconds"),
        ("min", "minute", "minutes"),
        ("h", "hr", "hour", "hours"),
        ("day", "days"),
        ("week", "weeks"),
        ("month", "months"),
        ("year", "years"),
        ("degree", "degrees", "°"),
        ("mph",),
        ("km/h",),
        ("dollar", "dollars", "usd", "$"),
        ("cent", "cents"),
        ("euro", "euros", "eur", "€"),
        ("£", "gbp"),
        ("unit", "units"),
    )
    for unit in names
}

DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
TIMES_TEN = r"\s*(?:e|(?:[x*×·]|\\times|\\cdot)\s*10\s*\^)\s*"
DECIMAL = re.compile(rf"(?P<mantissa>{DIGITS})(?:{TIMES_TEN}\{{?(?P<power>[+-]?\d+)\}}?)?", re.I)
RATIO = re.compile(rf"(?:(?P<whole>\d+)\s+)?(?P<top>{DIGITS})\s*/\s*(?P<bottom>{DIGITS})")
LATEX_RATIO = re.compile(r"(?P<whole>\d+)?\s*\\[dt]?frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))")
LONGEST, HIGHEST_POWER = 400, 400  # Beyond these a "number" is an attack on the arithmetic.


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number as written: its exact value before the percent sign is applied, that sign, and its unit."""

    value: Fraction
    percent: bool = False
    unit: str | None = None


def parse_number(text: str) -> Quantity | None:
    r"""Read a text that is one number and nothing else; None when it is not.

    >>> parse_number("1,000.5").value, parse_number("minus two thirds").value, parse_number(r"\frac{3}{4}").value
    (Fraction(2001, 2), Fraction(-2, 3), Fraction(3, 4))
    >>> parse_number("50%"), parse_number("5 apples and 2 pears")
    (Quantity(value=Fraction(50, 1), percent=True, unit=None), None)
    """
    if len(text) > LONGEST:
        return None
    body = text.strip().replace("−", "-").replace("–", "-")  # The signs people paste.
    body, percent = _without_percent(body)
    sign, body = _without_sign(body)
    body, unit = _without_unit(body)
    inner, body = _without_sign(body)  # "$-5" as well as "-$5".
    value = _value(body.strip())
    return None if value is None else Quantity(sign * inner * value, percent, unit)


def same_number(said: Quantity, gold: Quantity, *, percent: bool = False) -> bool:
    """Equal within ``max(1e-6, 1e-6 |gold|)``, in the same unit where both have one.

    ``50%`` is also ``0.5`` when the reference has the percent sign or ``percent`` is set.
    """
    if said.unit is not None and gold.unit is not None and said.unit != gold.unit:
        return False
    if _close(said.value, gold.value):
        return True
    if gold.percent and not said.percent:
        return _close(said.value, gold.value / 100)
    return percent and said.percent and not gold.percent and _close(said.value / 100, gold.value)


def _close(a: Fraction, b: Fraction) -> bool:
    return abs(a - b) <= max(Fraction(1, 10**6), abs(b) / 10**6)


def _without_percent(text: str) -> tuple[str, bool]:
    for sign in ("\\%", "%", "percent", "per cent"):
        if text.lower().endswith(sign):
            return text[: -len(sign)].rstrip(), True
    return text, False


def _without_sign(text: str) -> tuple[int, str]:
    for sign, factor in (("-", -1), ("+", 1), ("minus ", -1), ("negative ", -1)):
        if text.lower().startswith(sign):
            return factor, text[len(sign) :].lstrip()
    return 1, text


def _without_unit(text: str) -> tuple[str, str | None]:
    for sign in ("\\$", "$", "€", "£"):
        if text.startswith(sign):
            return text[len(sign) :].lstrip(), UNITS[sign.lstrip("\\")]
    found = re.fullmatch(r"(.*[\d}\w.])\s*?\s*(?<![a-z])(°|[a-z]+(?:/[a-z])?)\.?", text, re.I | re.S)
    if found and found[2].lower() in UNITS and found[1].strip():
        return found[1].strip(), UNITS[found[2].lower()]
    return text, None


def _value(text: str) -> Fraction | None:
    plain = re.sub(r"(?<=\d)(?:\\,|\{,\}|[\u00a0\u2009\u202f ])(?=\d{3}(?!\d))", ",", text)
    if found := DECIMAL.fullmatch(plain):
        return _decimal(found["mantissa"], found["power"])
    if found := RATIO.fullmatch(text):
        return _ratio(found["whole"], found["top"], found["bottom"])
    if found := LATEX_RATIO.fullmatch(text):
        return _ratio(found["whole"], found[2] or found[3], found[4] or found[5])
    return _words(text)


def _decimal(mantissa: str, power: str | None) -> Fraction | None:
    exponent = int(power or 0)
    return None if abs(exponent) > HIGHEST_POWER else Fraction(mantissa.replace(",", "")) * Fraction(10) ** exponent


def _ratio(whole: str | None, top: str, bottom: str) -> Fraction | None:
    """Whole part, numerator and denominator; the two may carry signs."""
    signs, numbers = 1, []
    for part in (top, bottom):
        sign, rest = _without_sign(part.strip())
        found = DECIMAL.fullmatch(rest)
        number = _decimal(found["mantissa"], found["power"]) if found else None
        if number is None:
            return None
        signs *= sign
        numbers.append(number)
    return None if numbers[1] == 0 else int(whole or 0) + signs * numbers[0] / numbers[1]


def _words(text: str) -> Fraction | None:
    words = re.sub(r"[\s-]+", " ", text.lower()).split()
    if not words or not all(word.isalpha() for word in words):
        return None
    if "point" in words:
        return _point(words)
    if words[-1] in PARTS:
        return _part(words)
    return _count(words)


def _point(words: list[str]) -> Fraction | None:
    """``three point one four``: a count, then digits."""
    at = words.index("point")
    whole = _count(words[:at]) if at else Fraction(0)
    digits = [SMALL.get(word, 10) for word in words[at + 1 :]]
    if whole is None or not digits or max(digits) > 9:
        return None
    return whole + Fraction(int("".join(map(str, digits))), 10 ** len(digits))


def _part(words: list[str]) -> Fraction | None:
    """``two thirds``, ``a half``, ``one and three quarters``."""
    bottom = PARTS[words[-1]]
    rest = words[:-1]
    whole = Fraction(0)
    if "and" in rest:
        at = len(rest) - 1 - rest[::-1].index("and")
        before = _count(rest[:at])
        if before is None:
            return None
        whole, rest = before, rest[at + 1 :]
    one = rest in (["a"], ["an"]) or (not rest and bottom in (2, 4))  # "third" alone is a place, "half" a number.
    top = Fraction(1) if one else _count(rest)
    return None if top is None else whole + top / bottom


def _count(words: list[str]) -> Fraction | None:
    """``two million three hundred and four``."""
    if not words or words[0] == "and" or words[-1] == "and":
        return None
    if words[0] == "a" and len(words) > 1 and words[1] in ("hundred", *LARGE):
        words = ["one", *words[1:]]
    total, group, last, ceiling = 0, 0, None, 10**15
    for word in words:
        if word == "and":
            continue
        if word in SMALL:
            # "twenty one" adds up, "one twenty" and "two three" are not one number.
            if last is not None and not (last >= 20 and SMALL[word] < 10 and SMALL[word] > 0):
                return None
            group, last = group + SMALL[word], SMALL[word]
        elif word == "hundred" and group < 100 and last != 0:
            group, last = max(group, 1) * 100, None
        elif word in LARGE and LARGE[word] < ceiling:
            ceiling = LARGE[word]
            total, group, last = total + max(group, 1) * ceiling, 0, None
        else:
            return None
    return Fraction(total + group)
