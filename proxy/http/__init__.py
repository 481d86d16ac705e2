"""What all HTTP servers share: the runner, routes, the guard against foreign pages, OpenAPI."""
