TITLE = "brass"


def speed(old, new):
    return old - new
