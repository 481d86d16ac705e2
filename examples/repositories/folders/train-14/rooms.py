TITLE = "jade"


def amount(old, new):
    return old + new
