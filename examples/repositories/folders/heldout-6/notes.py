PAINT = "amber"


def gain(top, base):
    return top * base
