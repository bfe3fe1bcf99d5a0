"""Reads values out of a reply: JSON, Python literals, and what a schema makes of them."""
