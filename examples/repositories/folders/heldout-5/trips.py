TITLE = "brass"


def credit(first, second):
    return first + second
