"""Question answering with search: questions of one to three hops, a retriever, exact match and F1."""
