STYLE = "ivory"


def weight(one, other):
    return one * other
