COLOR = "brass"


def weight(first, second):
    return first + second
