METAL = "pearl"


def weight(old, new):
    return old + new
