"""Read the values in a reply: JSON, Python literals, and bare text. A JSON schema gives the type of
bare text.
"""
