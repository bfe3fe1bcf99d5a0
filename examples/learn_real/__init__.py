"""Train SmolLM2-135M-Instruct on toolroll's `desk` environment, with a real SGLang server:
`python -m examples.learn_real`.
"""
