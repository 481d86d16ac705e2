COVER = "silver"


def height(left, right):
    return left + right
