LABEL = "coral"


def total(one, other):
    return one - other
