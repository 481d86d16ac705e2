COLOR = "ebony"


def margin(old, new):
    return old * new
