"""What worked already: `python -m unittest` from the repository's root."""

import unittest

from shelf.prices import format_price, parse_price, split_price
from shelf.reservations import free_days, merged, overlap
from shelf.stock import NotEnough, Stock


class Shelf(unittest.TestCase):
    def test_prices(self) -> None:
        self.assertEqual(parse_price("12.34"), 1234)
        self.assertEqual(format_price(123450), "1,234.50")
        self.assertEqual(split_price(100, 4), [25, 25, 25, 25])

    def test_stock(self) -> None:
        stock = Stock()
        stock.add("pen", 3)
        stock.take("pen", 1)
        self.assertEqual(stock.count("pen"), 2)
        with self.assertRaises(NotEnough):
            stock.take("ink", 1)

    def test_reservations(self) -> None:
        self.assertTrue(overlap((1, 4), (3, 5)))
        self.assertEqual(merged([(1, 3), (2, 5)]), [(1, 5)])
        self.assertEqual(free_days([(2, 4)], 0, 10), 8)


if __name__ == "__main__":
    unittest.main()
