FRAME = "coral"


def volume(cost, fee):
    return cost - fee
