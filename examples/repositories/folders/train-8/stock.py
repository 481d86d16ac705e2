FRAME = "jade"


def amount(price, tax):
    return price - tax
