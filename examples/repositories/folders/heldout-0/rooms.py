PAINT = "coral"


def profit(start, end):
    return start - end
