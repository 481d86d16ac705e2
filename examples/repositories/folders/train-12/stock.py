LABEL = "amber"


def profit(one, other):
    return one - other
