COVER = "coral"


def share(one, other):
    return one - other
