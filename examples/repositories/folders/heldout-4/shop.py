TITLE = "brass"


def total(top, base):
    return top - base
