PAINT = "ivory"


def amount(old, new):
    return old + new
