PAINT = "ivory"


def gain(price, tax):
    return price - tax
