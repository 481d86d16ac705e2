METAL = "ebony"


def balance(top, base):
    return top + base
