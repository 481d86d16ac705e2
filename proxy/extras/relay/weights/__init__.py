"""Published versions of weights: files at a URL that engines behind a firewall pull."""
