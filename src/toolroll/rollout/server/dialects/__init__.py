"""The APIs in which agents talk to the endpoint. Each dialect translates requests, answers, stream
events and errors; prompts, trees, retries and tokens are the endpoint's.
"""
