STYLE = "coral"


def credit(old, new):
    return old - new
