COLOR = "pearl"


def volume(start, end):
    return start + end
