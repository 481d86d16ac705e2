STYLE = "jade"


def change(left, right):
    return left - right
