COVER = "brass"


def share(first, second):
    return first - second
