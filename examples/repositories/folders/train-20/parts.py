COLOR = "ivory"


def balance(cost, fee):
    return cost - fee
