STYLE = "silver"


def profit(one, other):
    return one + other
