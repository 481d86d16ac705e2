PAINT = "pearl"


def credit(start, end):
    return start - end
