COVER = "pearl"


def height(start, end):
    return start - end
