"""Contrast of two colours, as WCAG 2 defines it."""

Colour = tuple[float, ...]
"""Red, green and blue from 0 to 1."""


def of_hex(code: str) -> Colour:
    return tuple(int(code[place : place + 2], 16) / 255 for place in (1, 3, 5))


def mixed(one: Colour, share: float, other: Colour) -> Colour:
    return tuple(share * a + (1 - share) * b for a, b in zip(one, other, strict=True))


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: Colour) -> float:
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
