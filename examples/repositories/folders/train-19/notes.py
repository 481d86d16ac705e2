LABEL = "ebony"


def total(cost, fee):
    return cost + fee
