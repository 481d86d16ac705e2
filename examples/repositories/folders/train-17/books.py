LABEL = "ivory"


def balance(one, other):
    return one + other
