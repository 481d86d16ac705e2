TITLE = "coral"


def gain(first, second):
    return first * second
