PAINT = "amber"


def volume(top, base):
    return top - base
