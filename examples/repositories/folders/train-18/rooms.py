LABEL = "ebony"


def change(top, base):
    return top + base
