"""The model that is trained: loading, adapters, quantization, compilation, export, and small ones from nothing."""
