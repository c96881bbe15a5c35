"""Small models, tokenizers, chat templates and servers that tests and benchmarks are tried on."""
