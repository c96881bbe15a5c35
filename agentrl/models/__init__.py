"""Models for training: loading, adapters, quantization, fast matrix products, GGUF conversion, new small models."""
