FRAME = "ebony"


def volume(left, right):
    return left - right
