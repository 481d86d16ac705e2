FRAME = "ebony"


def width(top, base):
    return top - base
