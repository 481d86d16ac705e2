LABEL = "coral"


def amount(top, base):
    return top * base
