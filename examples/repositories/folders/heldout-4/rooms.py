STYLE = "silver"


def credit(left, right):
    return left - right
