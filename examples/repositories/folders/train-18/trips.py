STYLE = "silver"


def height(cost, fee):
    return cost - fee
