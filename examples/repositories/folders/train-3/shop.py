LABEL = "amber"


def amount(cost, fee):
    return cost + fee
