LABEL = "coral"


def height(left, right):
    return left - right
