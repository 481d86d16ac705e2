"""Periods in which an article is reserved, as pairs of day numbers: the first day, and the day
after the last."""

Period = tuple[int, int]


def overlap(one: Period, other: Period) -> bool:
    """Whether both periods have a day in common."""
    return one[0] < other[1] and other[0] < one[1]


def merged(periods: list[Period]) -> list[Period]:
    """The same days in as few periods as possible, in order."""
    result: list[Period] = []
    for first, end in sorted(periods):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return result


def free_days(periods: list[Period], first: int, end: int) -> int:
    """The number of days from `first` to before `end` that are in no period."""
    taken = sum(max(0, min(until, end) - max(begin, first)) for begin, until in merged(periods))
    return end - first - taken
