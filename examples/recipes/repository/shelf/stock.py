"""How many pieces of each article there are."""


class NotEnough(Exception):
    """Fewer pieces are there than should be taken."""


class Stock:
    def __init__(self) -> None:
        self._pieces: dict[str, int] = {}

    def add(self, article: str, pieces: int) -> None:
        self._pieces[article] = self.count(article) + pieces

    def take(self, article: str, pieces: int) -> None:
        """Raises NotEnough, and takes nothing, if there are fewer pieces."""
        if pieces > self.count(article):
            raise NotEnough(f"{article}: {self.count(article)} of {pieces}")
        self._pieces[article] -= pieces
        if self._pieces[article] == 0:
            del self._pieces[article]

    def take_all(self, order: dict[str, int]) -> None:
        """Takes the whole order, or raises NotEnough and takes nothing."""
        for article, pieces in order.items():
            if pieces > self.count(article):
                raise NotEnough(f"{article}: {self.count(article)} of {pieces}")
        for article, pieces in order.items():
            self.take(article, pieces)

    def count(self, article: str) -> int:
        return self._pieces.get(article, 0)

    def articles(self) -> list[str]:
        """The articles of which there is at least one piece, by name."""
        return sorted(self._pieces)
