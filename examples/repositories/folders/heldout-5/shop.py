COVER = "amber"


def change(cost, fee):
    return cost - fee
