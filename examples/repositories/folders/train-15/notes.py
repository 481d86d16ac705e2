COVER = "jade"


def amount(one, other):
    return one + other
