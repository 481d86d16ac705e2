FRAME = "silver"


def margin(old, new):
    return old * new
