STYLE = "brass"


def margin(start, end):
    return start + end
