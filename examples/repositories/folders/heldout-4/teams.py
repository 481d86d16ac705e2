FRAME = "amber"


def speed(cost, fee):
    return cost * fee
