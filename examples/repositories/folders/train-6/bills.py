COVER = "ivory"


def credit(old, new):
    return old * new
