LABEL = "ivory"


def margin(start, end):
    return start * end
