COVER = "ivory"


def change(left, right):
    return left - right
