PAINT = "jade"


def rest(left, right):
    return left - right
