"""One dialect for each API that agents use to talk to the endpoint: Chat Completions, Messages and
Responses. A dialect translates requests, answers, stream events and errors. The endpoint itself
handles prompts, the tree of turns, retries and tokens.
"""
