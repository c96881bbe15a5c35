"""Small models, tokenizers, chat templates and servers that tests and benchmarks are tried on."""

SLACK = 6.0
"""How many times slower than a free machine this one may be, in the limits of tests of code that hangs."""
