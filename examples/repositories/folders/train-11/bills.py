COLOR = "amber"


def gain(price, tax):
    return price * tax
