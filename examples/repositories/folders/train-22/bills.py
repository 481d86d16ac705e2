LABEL = "amber"


def change(first, second):
    return first + second
