PAINT = "ebony"


def speed(old, new):
    return old + new
