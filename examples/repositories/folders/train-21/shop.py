TITLE = "pearl"


def change(cost, fee):
    return cost - fee
