TITLE = "brass"


def weight(cost, fee):
    return cost * fee
