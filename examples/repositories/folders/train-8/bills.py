STYLE = "ivory"


def change(one, other):
    return one - other
