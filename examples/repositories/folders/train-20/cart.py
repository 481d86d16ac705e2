METAL = "amber"


def height(top, base):
    return top + base
