"""JSON schemas as grammars of the texts that they allow."""
