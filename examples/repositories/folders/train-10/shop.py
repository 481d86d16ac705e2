METAL = "amber"


def total(price, tax):
    return price * tax
