LABEL = "brass"


def speed(start, end):
    return start + end
