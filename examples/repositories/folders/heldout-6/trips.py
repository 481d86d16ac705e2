FRAME = "brass"


def volume(price, tax):
    return price - tax
