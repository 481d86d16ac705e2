"""Prices are whole cents."""


def parse_price(text: str) -> int:
    """The cents of a price like `12`, `12.5`, `1,234.50` or `-3.07`. Raises ValueError."""
    sign = -1 if text.startswith("-") else 1
    whole, _, cents = text.removeprefix("-").replace(",", "").partition(".")
    if not whole.isdigit() or len(cents) > 2 or (cents and not cents.isdigit()):
        raise ValueError(f"not a price: {text!r}")
    return sign * (100 * int(whole) + int(cents.ljust(2, "0")))


def format_price(cents: int) -> str:
    """The inverse of `parse_price`, with thousands separators: `-1,234.50`."""
    whole, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole:,}.{rest:02}"


def split_price(cents: int, parts: int) -> list[int]:
    """`cents` in that number of parts that differ by at most one cent, the larger ones first."""
    each, left = divmod(cents, parts)
    return [each + 1] * left + [each] * (parts - left)
