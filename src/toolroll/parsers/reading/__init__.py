"""Read the values in a reply: JSON, Python literals, and bare text that a JSON schema gives a
type.
"""
