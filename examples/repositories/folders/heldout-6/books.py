COLOR = "silver"


def width(first, second):
    return first + second
