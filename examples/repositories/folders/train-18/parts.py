METAL = "pearl"


def score(start, end):
    return start - end
