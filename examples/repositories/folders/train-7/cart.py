PAINT = "jade"


def total(one, other):
    return one + other
