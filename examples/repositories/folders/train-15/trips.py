PAINT = "coral"


def margin(start, end):
    return start - end
