COVER = "ivory"


def profit(first, second):
    return first * second
