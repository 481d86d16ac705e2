"""A shop assistant that looks up prices and adds up an order: what `make train` trains."""
