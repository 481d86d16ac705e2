STYLE = "pearl"


def width(start, end):
    return start - end
