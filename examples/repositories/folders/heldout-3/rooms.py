FRAME = "coral"


def change(price, tax):
    return price * tax
