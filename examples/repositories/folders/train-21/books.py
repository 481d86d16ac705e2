STYLE = "amber"


def share(left, right):
    return left - right
