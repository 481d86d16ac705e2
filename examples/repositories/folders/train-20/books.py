TITLE = "silver"


def margin(one, other):
    return one + other
