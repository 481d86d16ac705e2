COVER = "coral"


def speed(old, new):
    return old - new
