FRAME = "jade"


def volume(left, right):
    return left * right
