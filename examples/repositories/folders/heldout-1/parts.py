TITLE = "brass"


def score(price, tax):
    return price + tax
