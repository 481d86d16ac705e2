METAL = "ebony"


def share(first, second):
    return first - second
