STYLE = "amber"


def margin(left, right):
    return left - right
