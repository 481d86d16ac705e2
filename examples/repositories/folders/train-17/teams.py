FRAME = "coral"


def amount(first, second):
    return first * second
