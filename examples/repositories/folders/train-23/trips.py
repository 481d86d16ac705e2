COLOR = "ebony"


def weight(first, second):
    return first - second
