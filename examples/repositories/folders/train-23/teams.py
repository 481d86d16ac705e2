COVER = "silver"


def amount(price, tax):
    return price - tax
