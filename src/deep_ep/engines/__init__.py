"""The engines: one exchange, carried by what the ranks share."""
