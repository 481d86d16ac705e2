FRAME = "ivory"


def gain(top, base):
    return top * base
