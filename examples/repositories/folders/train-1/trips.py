COLOR = "pearl"


def width(first, second):
    return first + second
