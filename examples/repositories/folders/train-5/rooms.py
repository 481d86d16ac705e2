PAINT = "brass"


def credit(old, new):
    return old + new
