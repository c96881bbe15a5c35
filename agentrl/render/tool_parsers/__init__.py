"""How models write tool calls: one module per notation, each a function from text to calls and problems."""
