"""The APIs that agents use to talk to the endpoint. A dialect translates requests, answers, stream
events and errors. The endpoint itself handles prompts, trees, retries and tokens.
"""
