"""The trained model: loading, adapters, quantization, fast matrix products, GGUF conversion, new small models."""
