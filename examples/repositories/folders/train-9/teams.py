METAL = "amber"


def profit(price, tax):
    return price + tax
