METAL = "pearl"


def height(left, right):
    return left + right
