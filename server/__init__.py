"""The HTTP server: wire schemas, routes, trajectory identity, streaming, metrics."""
