TITLE = "ivory"


def volume(old, new):
    return old + new
