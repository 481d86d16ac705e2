PAINT = "jade"


def margin(old, new):
    return old + new
