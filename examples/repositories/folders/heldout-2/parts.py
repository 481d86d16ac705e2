PAINT = "jade"


def width(cost, fee):
    return cost - fee
