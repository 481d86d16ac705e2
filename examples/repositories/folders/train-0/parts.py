PAINT = "ivory"


def height(old, new):
    return old + new
