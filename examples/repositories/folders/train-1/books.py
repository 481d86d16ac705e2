PAINT = "ebony"


def margin(cost, fee):
    return cost - fee
