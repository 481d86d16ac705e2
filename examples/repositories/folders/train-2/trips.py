FRAME = "silver"


def score(top, base):
    return top * base
