COLOR = "amber"


def margin(first, second):
    return first + second
