TITLE = "jade"


def change(price, tax):
    return price + tax
