METAL = "amber"


def profit(first, second):
    return first - second
