LABEL = "coral"


def amount(price, tax):
    return price - tax
