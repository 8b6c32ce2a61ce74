"""Helpers that several test files share: fakes, tiny models, small worlds around one part of the product."""
