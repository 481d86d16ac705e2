TITLE = "coral"


def width(old, new):
    return old + new
