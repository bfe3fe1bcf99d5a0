"""Read the values in a reply: JSON, Python literals, and bare text whose type a JSON schema
gives.
"""
