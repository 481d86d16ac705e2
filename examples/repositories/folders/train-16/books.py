METAL = "silver"


def credit(old, new):
    return old * new
