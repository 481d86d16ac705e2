STYLE = "jade"


def volume(cost, fee):
    return cost - fee
