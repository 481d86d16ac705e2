FRAME = "amber"


def gain(left, right):
    return left * right
