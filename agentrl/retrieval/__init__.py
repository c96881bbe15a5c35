"""Finding passages: a corpus in memory, or a retriever behind HTTP. For tools and environments alike."""
