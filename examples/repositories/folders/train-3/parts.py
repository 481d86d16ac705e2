METAL = "silver"


def profit(first, second):
    return first + second
